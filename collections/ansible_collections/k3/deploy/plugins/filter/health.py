"""Filters that judge a rank's health; the rules are in plugin_utils/health_rules.py."""

from __future__ import annotations

from ansible_collections.k3.deploy.plugins.plugin_utils import health_rules


def health_problems(reading, bands=None):
    """What makes a rank unfit before a run: sentences, each with its remedy; empty when it is well.

    reading: the result of k3.deploy.rank_health. bands: {name: {min, max}} of what it measures.
    """
    return health_rules.sentences(health_rules.preflight_findings(reading, bands), "fault")


def health_warnings(reading, bands=None):
    """What an operator should know of a rank and what keeps nobody from a run: sentences, each with its remedy."""
    return health_rules.sentences(health_rules.preflight_findings(reading, bands), "warning")


class FilterModule:
    """Registers the filters."""

    def filters(self):
        return {"health_problems": health_problems, "health_warnings": health_warnings}
