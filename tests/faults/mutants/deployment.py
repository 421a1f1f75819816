"""Mutants of the files that an operator installs."""

from __future__ import annotations

from faults.rounds import Mutant

_TEST_KUBERNETES = "pytest tests/examples/test_kubernetes.py"
_TEST_SLURM = "pytest tests/examples/test_slurm.py"

MUTANTS = (
    Mutant(
        "a signature for any purpose is a release's",
        "SECURITY.md",
        "ssh-keygen -Y verify -f signers -I tierd -n tierd -s",
        "ssh-keygen -Y check-novalidate -n tierd -s",
        "pytest tests/test_dist.py -k another_s_signature",
    ),
    Mutant(
        "packages are installed without their hashes",
        "constraints.txt",
        "--require-hashes\n",
        "",
        "pytest tests/test_supply.py -k that_is_pinned",
    ),
    Mutant(
        "a pod is killed while its daemon drains",
        "examples/kubernetes/daemonset.yaml",
        "terminationGracePeriodSeconds: 180",
        "terminationGracePeriodSeconds: 120",
        f"{_TEST_KUBERNETES} -k grace",
    ),
    Mutant(
        "a draining daemon is restarted by its probe",
        "examples/kubernetes/daemonset.yaml",
        "livenessProbe:\n            httpGet: {path: /healthz,",
        "livenessProbe:\n            httpGet: {path: /readyz,",
        f"{_TEST_KUBERNETES} -k probes",
    ),
    Mutant(
        "the kubelet's probes are turned away",
        "examples/kubernetes/sidecar.yaml",
        'listen = "0.0.0.0:9464"',
        'listen = "127.0.0.1:9464"',
        f"{_TEST_KUBERNETES} -k probes",
    ),
    Mutant(
        "one job's end stops the daemon of another",
        "examples/slurm/epilog.sh",
        'rmdir "$jobs/$account" 2>/dev/null && systemctl stop',
        'rm -rf "$jobs/$account" && systemctl stop',
        f"{_TEST_SLURM} -k leaves_with_all",
    ),
    Mutant(
        "the tiers' outage drains every node of a cluster",
        "examples/slurm/prolog.sh",
        "if [ $? -eq 11 ]; then",
        "if [ $? -ne 0 ]; then",
        f"{_TEST_SLURM} -k drains_a_node",
    ),
    Mutant(
        "a job's ranks save different steps before its limit",
        "examples/slurm/train.py",
        "            dist.all_reduce(last, dist.ReduceOp.MAX)\n",
        "",
        f"{_TEST_SLURM} -k near_its_limit",
    ),
    Mutant(
        "the unit has fewer threads than a large node needs",
        "systemd/tierd.service",
        "TasksMax=2048",
        "TasksMax=512",
        "pytest tests/system/test_unit.py -k bounds_memory",
    ),
)
