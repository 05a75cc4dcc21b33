"""The model that drafts tokens: the config that its own layers would have. Pure."""

from __future__ import annotations

from harness.layouts.page import Config, UnknownLayout, count


def of(config: Config) -> Config:
    """`config` as its multi-token prediction (MTP) layers alone would have it: alike but in number,
    and in DeepSeek-V4 with the compress ratios that follow those of the model's own layers.

    UnknownLayout where the config has no such layers.
    """
    if config.get("num_nextn_predict_layers") is None:
        raise UnknownLayout("a config without num_nextn_predict_layers has no MTP layers")
    layers = count(config, "num_nextn_predict_layers")
    own = {**config, "num_hidden_layers": layers}
    if config.get("compress_ratios") is not None:
        depth = count(config, "num_hidden_layers")
        own["compress_ratios"] = list(config["compress_ratios"])[depth : depth + layers]
    return own
