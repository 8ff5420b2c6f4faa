#!/usr/bin/python
"""Documentation of k3.deploy.next_block; the work is done by the action plugin of the same name."""

from __future__ import annotations

DOCUMENTATION = r"""
module: next_block
short_description: Say which block of a run is measured next
description:
  - Asks the run's advisor, a program on the controller that judges the records so far. It puts void blocks aside, so that they are
    measured again, and ends the run when its verdict stands. Without an advisor, the next block is the first planned one without a record.
options:
  run_dir:
    description: Run directory on the controller.
    type: path
    required: true
  blocks:
    description: The planned blocks in order.
    type: list
    elements: dict
    required: true
  advisor:
    description: Command line of the advisor, to which the run directory is added.
    type: list
    elements: str
    default: []
author: [the k3deploy project (@k3deploy)]
attributes:
  check_mode:
    support: full
    description: The same in check mode.
"""

EXAMPLES = r"""
- name: What is measured next
  k3.deploy.next_block:
    run_dir: "{{ k3_run_dir }}"
    blocks: "{{ k3_run_blocks }}"
  register: block_next
  run_once: true
"""

RETURN = r"""
block:
  description: The block, or null when the run is over.
  type: dict
  returned: success
why:
  description: Why this one, or why no more.
  type: str
  returned: success
"""
