"""The errors that users see: what is wrong, where, and what to do about it."""

from __future__ import annotations


class MoEOptError(Exception):
    """Base of every error that moe_opt raises on purpose."""


class ConfigError(MoEOptError, ValueError):
    """A setting that is unknown, out of range or does not combine with another one."""


class UnsupportedModelError(MoEOptError, ValueError):
    """The model has no MoE layers, or its family is outside Transformers' experts interface."""


class IncompatibleUnitedExpertsError(MoEOptError, ValueError):
    """United experts that were made for another model, or a checkpoint that is damaged."""
