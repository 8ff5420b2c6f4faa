"""An account that can do nothing by itself, and directories with exactly the owners that they need."""

from __future__ import annotations

from testinfra.host import Host

ROOT = "/opt/k3deploy"


def test_the_account_cannot_log_in_and_has_no_group_but_its_own(rank1: Host) -> None:
    account = rank1.user("k3deploy")
    assert account.shell == "/usr/sbin/nologin"
    assert account.uid < 1000
    assert account.groups == ["k3deploy"]
    assert account.password in ("!", "*", "!*")
    assert rank1.check_output("getent group k3deploy | cut -d: -f4") == ""


def test_the_account_owns_only_where_it_must_write(rank1: Host) -> None:
    said = rank1.check_output(f"find {ROOT} -printf '%P %m %u:%g\\n'").splitlines()
    found = {line.split(" ")[0]: line.split(" ", 1)[1] for line in said}
    assert found == {
        "": "755 root:root",
        "releases": "755 root:root",
        "candidates": "755 root:root",
        "libexec": "755 root:root",
        "state": "750 root:root",
        "builds": "755 k3deploy:k3deploy",
        "work": "755 k3deploy:k3deploy",
        "work/parity": "755 k3deploy:k3deploy",
    }
