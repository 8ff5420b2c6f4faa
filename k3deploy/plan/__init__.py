"""A row, the baseline and a cluster, fully resolved: what runs where, how it is measured, and what is to be expected.

``make_plan`` is a pure function of its inputs but for one reading of the model's own files; it touches no rank.
``render_run_layer`` turns a plan into the inventory layer from which the roles work.
"""

from k3deploy.plan.arms import slug
from k3deploy.plan.campaign import campaign_candidates, campaign_name, make_campaign
from k3deploy.plan.layer import render_run_layer
from k3deploy.plan.make import make_plan
from k3deploy.plan.model import Plan, PlanError, PlannedArm

__all__ = [
    "Plan",
    "PlanError",
    "PlannedArm",
    "campaign_candidates",
    "campaign_name",
    "make_campaign",
    "make_plan",
    "render_run_layer",
    "slug",
]
