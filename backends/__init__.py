"""Arithmetic: descriptions of models, weights, and the engines that run one shard on one device."""
