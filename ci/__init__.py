"""Buildkite: the pipeline, a shard of a run, and the merge of all its shards."""
