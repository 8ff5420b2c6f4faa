"""Who else can reach a rank's RPC ports: the protocol has no authentication, and whoever connects can read and write the server's memory."""

from __future__ import annotations

WILDCARDS = ("0.0.0.0", "*", "::", "[::]")


def exposure_warnings(state, fabric_address, production):
    """Sentences about RPC ports that more than the fabric reaches, each with its remedy; empty when all is well.

    state: the result of k3.deploy.rank_state. fabric_address: the rank's. production: the inventory's k3_production.
    """
    port = int(production.get("worker_port") or 0)
    open_address = next((item["address"] for item in state["listeners"] if item["port"] == port and item["address"] in WILDCARDS), None)
    other = sorted({item["address"] for item in state["listeners"] if item["port"] == port} - {fabric_address, "127.0.0.1", *WILDCARDS})
    warnings = []
    if open_address:
        reached = ", ".join(address for address in state["addresses"] if not address.startswith(("127.", "::1", "fe80:")))
        warnings.append(
            f"production's worker listens on {open_address}:{port}, so that every network of this rank reaches it ({reached}) and RPC asks for no "
            f"password: give its unit --host {fabric_address}, or close the port to all but the ranks"
        )
    elif other:
        warnings.append(
            f"production's worker listens on {', '.join(other)} port {port}, not on the fabric address {fabric_address} alone: see its unit's --host"
        )
    if fabric_address in state.get("default_route_addresses", []):
        warnings.append(
            f"the fabric address {fabric_address} is on the interface of the default route: whoever is routed to this rank reaches the RPC ports, "
            "so close them to all but the ranks, or use an interface of their own"
        )
    return warnings


class FilterModule:
    """Registers the filter."""

    def filters(self):
        return {"exposure_warnings": exposure_warnings}
