"""The build that a candidate runs."""

from __future__ import annotations

from k3deploy.inventory import BuildSpec, Cluster
from k3deploy.matrix import BuildChange, Candidate
from k3deploy.plan.model import PlanError


def build_of(cluster: Cluster, candidate: Candidate) -> tuple[str, BuildSpec]:
    """Name and spec: the cluster's own build, or the baseline's with the patch sets that the row needs."""
    change = candidate.build
    name = cluster.build if change is None else change.name
    if change is not None and name not in cluster.builds:
        return name, _patched(cluster, candidate.name, change)
    return name, cluster.builds[name]


def _patched(cluster: Cluster, candidate: str, change: BuildChange) -> BuildSpec:
    from k3deploy import patches

    base = cluster.builds[cluster.build]
    known = patches.list_names()
    if change.patch_sets and all(name in known for name in change.patch_sets):
        names = [*base.patch_sets, *(name for name in change.patch_sets if name not in base.patch_sets)]
        chosen = patches.select(names)
        if base.source.kind == "prebuilt":
            raise PlanError(
                f"{candidate} changes the source, but {cluster.name}'s build {cluster.build} is prebuilt",
                remedy=f"Give its source in the inventory, or name a build that has it: k3_builds.{change.name}.",
            )
        needs_cuda = [one.name for one in chosen if one.manifest.backend == "cuda"]
        if base.backend == "cpu" and needs_cuda:
            raise PlanError(
                f"{candidate} needs CUDA: patch set {', '.join(needs_cuda)} changes CUDA kernels, and "
                f"{cluster.name} builds for the CPU",
                remedy="Try it on a cluster whose build has backend: cuda.",
            )
        return base.model_copy(update={"patch_sets": names, "cmake": {**base.cmake, **change.cmake}})
    needed = f"patch set {', '.join(change.patch_sets)}" if change.patch_sets else "a binary that is not made here"
    raise PlanError(
        f"{candidate} needs {needed}, which is not available on {cluster.name}: {change.needs}",
        remedy=(
            f"Name a build that contains it: k3_builds.{change.name} in the inventory, of kind tree or prebuilt. "
            f"There is: {', '.join(cluster.builds)}."
        ),
    )
