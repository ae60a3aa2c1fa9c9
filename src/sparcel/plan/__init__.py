"""Will it help: what a step of training takes with every method, on a cluster as it is."""

from sparcel.plan.models import MODELS, Model, model_of
from sparcel.plan.planner import Plan, Row, Workload, plan

__all__ = ["MODELS", "Model", "Plan", "Row", "Workload", "model_of", "plan"]
