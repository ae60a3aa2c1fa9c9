"""Will it help: what a step of training takes with every method, on a cluster as it is."""

from sparcel.tools.plan.planner import Plan, plan
from sparcel.tools.plan.steps import MODELS, Model, PlannedStep, Workload, model_of

__all__ = ["MODELS", "Model", "Plan", "PlannedStep", "Workload", "model_of", "plan"]
