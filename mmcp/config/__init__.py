"""Typed configs: one decorator for every config class of the library, read from YAML and `section.key=value`."""

from mmcp.config.errors import ConfigError
from mmcp.config.load import as_values, dump, load
from mmcp.config.typed import OneOf, config

__all__ = ["ConfigError", "OneOf", "as_values", "config", "dump", "load"]
