"""What tests of real llama.cpp on this machine share."""

from __future__ import annotations

import pytest
from labkit import built_release
from llamakit import Llama, llama_of

from k3deploy.lab.cluster import Lab


@pytest.fixture(scope="session")
def llama(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """The lab's own build."""
    return llama_of(lab, built_release(lab), tmp_path_factory.mktemp("libraries"))
