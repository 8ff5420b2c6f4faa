"""What tests of real llama.cpp on this machine share."""

from __future__ import annotations

from dataclasses import replace

import pytest
from labkit import built_release, built_releases, lab_build
from llamakit import Llama, llama_of, undisturbed

from k3deploy.lab.cluster import Lab


@pytest.fixture(scope="session")
def llama(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """The lab's own build."""
    return llama_of(lab, built_release(lab), tmp_path_factory.mktemp("libraries"))


@pytest.fixture(scope="session")
def with_bench(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """The lab's build with llama-bench beside the server, undisturbed; the compiler's cache has all else of it."""
    name, spec = lab_build()
    more = spec.model_copy(update={"targets": [*spec.targets, "llama-bench"]})
    made = llama_of(lab, built_releases(lab, {name: more})[name], tmp_path_factory.mktemp("libraries"))
    return replace(made, front=undisturbed())
