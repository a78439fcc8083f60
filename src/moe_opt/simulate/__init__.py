"""Trace-driven fleet simulator: it runs the very policies of `moe_opt.cluster` on live state, at any fleet
size.

`simulate(trace, policy, fleet, cost)` is the whole of it; `presets` names models, `costs` the price of a
step.
"""

from moe_opt.simulate.costs import StepCost
from moe_opt.simulate.engine import simulate
from moe_opt.simulate.experts import BatchExperts, ExpertModel, ProfileExperts
from moe_opt.simulate.fleet import Drain, Fail, FleetConfig, Recover, ScaleUp, WorkerSpec
from moe_opt.simulate.metrics import Interval, SimResult, mean_interval
from moe_opt.simulate.models import MODELS, get_model

__all__ = [
    "MODELS",
    "BatchExperts",
    "Drain",
    "ExpertModel",
    "Fail",
    "FleetConfig",
    "Interval",
    "ProfileExperts",
    "Recover",
    "ScaleUp",
    "SimResult",
    "StepCost",
    "WorkerSpec",
    "get_model",
    "mean_interval",
    "simulate",
]
