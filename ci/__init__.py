"""The nightly: pipeline, shards and their merge on Buildkite, or on any other CI."""
