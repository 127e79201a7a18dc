"""Predict throughput on a machine that is not here: what would more memory bandwidth bring to a T4's host?

.venv/bin/python examples/simulate_a_machine.py

A machine is a GPU's file and a host's file of configs/hardware/. This copies the host of an AWS g4dn.4xlarge under
another name, with twice the memory bandwidth, and simulates Llama-2-7B on both. All figures are SIMULATED.
"""

import json
import tempfile
from pathlib import Path

import yaml

from apex.cli.simulate import Simulate
from apex.source_tree import CONFIGS

SYSTEMS = ("swiftllm", "neo", "apex")


def main() -> None:
    host = yaml.safe_load((CONFIGS / "hardware/g4dn-4xlarge.yaml").read_text())
    host["name"] = "g4dn.4xlarge with twice the bandwidth"
    host["figures"]["peak_bandwidth_gb_s"] |= {"value": 281.6, "status": "assumed", "origin": "twice the g4dn's"}
    with tempfile.TemporaryDirectory() as folder:
        faster = Path(folder) / "faster-host.yaml"
        faster.write_text(yaml.safe_dump(host))
        records = [*simulate("g4dn-4xlarge", Path(folder)), *simulate(str(faster), Path(folder))]
    print("\nSIMULATED output tokens/s")
    for record in records:
        print(f"{record['host']:<45} {record['system']:<9} {record['output_tokens_per_s']:8.1f}")


def simulate(host: str, folder: Path) -> list[dict]:
    """One record a system, as `apex simulate --output` writes it; prints the same report."""
    output = folder / "records.json"
    sizes = {"num_requests": 60, "input_len": 200, "output_len": 100}
    Simulate(system=SYSTEMS, gpu="t4", host=host, model="llama-2-7b", output=output, **sizes).run()
    return json.loads(output.read_text())


if __name__ == "__main__":
    main()
