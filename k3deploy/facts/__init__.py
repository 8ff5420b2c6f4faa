"""Everything that was measured, as validated data: block records, ``facts.json``, and what the logs say.

``assemble(run_dir)`` reads ``blocks/*.json`` and the logs that they name and returns ``Facts``; nothing is judged
here. Memory is in MiB, times are in milliseconds unless the name ends in ``_seconds``.
"""

from k3deploy.facts.assemble import assemble, load_facts, read_model, write_facts
from k3deploy.facts.logs import parse_head_log, parse_worker_log
from k3deploy.facts.schema import Block, Cell, Facts, Sample, State, TransportProof, Unit, Verified, VoidBlock

__all__ = [
    "Block",
    "Cell",
    "Facts",
    "Sample",
    "State",
    "TransportProof",
    "Unit",
    "Verified",
    "VoidBlock",
    "assemble",
    "load_facts",
    "parse_head_log",
    "parse_worker_log",
    "read_model",
    "write_facts",
]
