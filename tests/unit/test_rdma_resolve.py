"""Which RDMA device and GID own the fabric address, on trees of hosts of every known shape."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "collections"))
sys.path.insert(0, str(Path(__file__).parent))

from ansible_collections.k3.deploy.plugins.module_utils import rdma
from ansible_collections.k3.deploy.plugins.modules import rdma_bandwidth
from ansible_collections.k3.deploy.plugins.modules import rdma_link as module
from rdmatree import FIXTURES, SHAPES, make_tree

ADDRESS = "192.168.100.11"


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {shape: make_tree(shape, tmp_path_factory.mktemp(shape)) for shape in SHAPES}


def resolve(tree: Path, address: str = ADDRESS, device: str | None = None, gid: int | None = None) -> dict:
    return rdma.resolve(rdma.read_devices(str(tree)), rdma.read_netdevs(str(tree)), address, device, gid)


@pytest.mark.parametrize(
    ("shape", "address", "device", "gid", "netdev", "mtu"),
    [
        ("two-devices-one-cable", ADDRESS, "rocep1s0f1", 3, "enp1s0f1np1", 4096),
        ("two-devices-one-cable", "192.168.101.11", "roceP2p1s0f1", 3, "enP2p1s0f1np1", 4096),
        ("two-cables", ADDRESS, "rocep1s0f1", 3, "enp1s0f1np1", 4096),
        ("two-cables", "192.168.102.11", "rocep1s0f0", 3, "enp1s0f0np0", 4096),
        ("gid-index-5", ADDRESS, "rocep1s0f1", 5, "enp1s0f1np1", 4096),
        ("second-device-no-ipv4", ADDRESS, "rocep1s0f1", 3, "enp1s0f1np1", 1024),
        ("ipv6-fabric", "fd00:c0:0:1::11", "rocep1s0f1", 3, "enp1s0f1np1", 4096),
        ("rxe", "192.0.2.11", "rxe0", 1, "enP7s7", 1024),
    ],
)
def test_the_device_and_the_roce_v2_gid_of_the_address_are_found(
    trees: dict[str, Path], shape: str, address: str, device: str, gid: int, netdev: str, mtu: int
) -> None:
    found = resolve(trees[shape], address)
    assert found["problems"] == []
    assert (found["device"], found["port"], found["gid"], found["type"]) == (device, 1, gid, "RoCE v2")
    assert (found["netdev"], found["rdma_mtu"], found["state"]) == (netdev, mtu, "ACTIVE")


@pytest.mark.parametrize(
    ("shape", "address", "word"),
    [
        ("v1-only", ADDRESS, "no RoCE v2 GID"),
        ("infiniband", ADDRESS, "are InfiniBand"),
        ("none", ADDRESS, "no RDMA device"),
        ("two-cables", "192.168.9.9", "no RDMA device owns 192.168.9.9 (they own"),
        ("rxe", ADDRESS, "rxe0: 192.0.2.11"),
    ],
)
def test_a_tree_that_cannot_carry_rdma_says_why(trees: dict[str, Path], shape: str, address: str, word: str) -> None:
    found = resolve(trees[shape], address)
    assert found["device"] is None
    assert word in "\n".join(found["problems"])


def test_of_two_devices_on_one_cable_it_says_which_and_why(trees: dict[str, Path]) -> None:
    found = resolve(trees["two-devices-one-cable"])
    assert found["sharing"] == [{"device": "roceP2p1s0f1", "address": "192.168.101.11"}]
    assert "roceP2p1s0f1 is the same cable and has 192.168.101.11" in found["why"]
    bare = resolve(trees["second-device-no-ipv4"])
    assert bare["sharing"] == [{"device": "roceP2p1s0f1", "address": None}]


@pytest.mark.parametrize(
    ("device", "gid", "word"),
    [
        (None, 3, "without k3_rdma_device"),
        ("mlx5_9", None, "does not exist on this rank (there is: roceP2p1s0f0"),
        ("roceP2p1s0f1", None, "does not own 192.168.100.11: rocep1s0f1 does"),
        ("rocep1s0f1", 1, "that is at 2 (IB/RoCE v1), 3 (RoCE v2)"),
        ("rocep1s0f1", 2, "no RoCE v2 GID"),
    ],
)
def test_a_pin_that_does_not_own_the_address_is_an_error(
    trees: dict[str, Path], device: str | None, gid: int | None, word: str
) -> None:
    found = resolve(trees["two-devices-one-cable"], device=device, gid=gid)
    assert found["device"] is None
    assert word in "\n".join(found["problems"])


def test_pins_that_own_the_address_are_taken(trees: dict[str, Path]) -> None:
    found = resolve(trees["two-devices-one-cable"], device="rocep1s0f1", gid=3)
    assert (found["device"], found["gid"], found["problems"]) == ("rocep1s0f1", 3, [])


def test_an_active_port_is_taken_before_one_that_is_down(trees: dict[str, Path]) -> None:
    devices, netdevs = (read(str(trees["two-devices-one-cable"])) for read in (rdma.read_devices, rdma.read_netdevs))
    same = devices["roceP2p1s0f1"]["ports"]["1"]["gids"]
    same[-1]["gid"] = rdma.gid_of(ADDRESS)
    assert rdma.resolve(devices, netdevs, ADDRESS)["device"] == "roceP2p1s0f1"
    devices["roceP2p1s0f1"]["ports"]["1"]["state"] = "DOWN"
    assert rdma.resolve(devices, netdevs, ADDRESS)["device"] == "rocep1s0f1"


def test_a_port_that_is_down_is_a_problem_even_where_it_owns_the_address(trees: dict[str, Path]) -> None:
    devices, netdevs = (read(str(trees["rxe"])) for read in (rdma.read_devices, rdma.read_netdevs))
    devices["rxe0"]["ports"]["1"]["state"] = "DOWN"
    found = rdma.resolve(devices, netdevs, "192.0.2.11")
    assert "port 1 of rxe0 is DOWN, not ACTIVE" in found["problems"][0]


def test_counters_are_read_where_a_driver_has_them(trees: dict[str, Path]) -> None:
    mlx = rdma.read_devices(str(trees["two-cables"]))["rocep1s0f1"]["ports"]["1"]
    assert mlx["counters"]["port_xmit_data"] > 0
    soft = rdma.read_devices(str(trees["rxe"]))["rxe0"]
    assert soft["pci"] is None
    assert soft["ports"]["1"]["counters"] == {}
    assert soft["ports"]["1"]["hw_counters"]["rdma_sends"] == 5120


def test_a_rank_without_the_subsystem_is_read_like_one_without_a_device(tmp_path: Path) -> None:
    assert resolve(tmp_path)["problems"][0].startswith("this rank has no RDMA device")


def test_only_a_pinned_arm_gives_the_program_a_device_and_an_index(trees: dict[str, Path]) -> None:
    found = resolve(trees["gid-index-5"])
    assert module.environment("pinned", found) == 'GGML_RDMA_DEV="rocep1s0f1"\nGGML_RDMA_GID="5"\n'
    assert module.environment("auto", found) == ""
    assert module.environment("pinned", resolve(trees["none"])) == ""


@pytest.mark.parametrize(
    ("name", "speed"),
    [("bad-13g", 13.33), ("good-mtu1500", 92.57), ("good-mtu9000", 98.03), ("wrong-gid-rc0", None)],
)
def test_a_bandwidth_report_is_read_and_one_without_a_result_is_none(name: str, speed: float | None) -> None:
    assert rdma.write_bandwidth((FIXTURES / f"perftest/ib_write_bw-{name}.txt").read_text()) == speed


def test_the_bandwidth_is_measured_on_the_device_and_the_gid_of_the_address() -> None:
    words = " ".join(rdma_bandwidth.command({"device": "roce0", "gid": 3, "port": 18515, "seconds": 2}))
    assert words == "ib_write_bw -d roce0 -i 1 -x 3 -p 18515 -F --report_gbits -s 1048576 -D 2"
