"""Mutants of the stores of Google and Azure, of what a refusal leaves closed, and of what an operator installs."""

from __future__ import annotations

from faults.rounds import Mutant

_CLOUD, _STORE, _ANSWERS = (
    "pytest tests/stores/test_cloud.py",
    "tierd/stores/cloud/cloud_store.py",
    "tierd/stores/cloud/answers.py",
)
_KUBERNETES, _SLURM = "pytest tests/examples/test_kubernetes.py", "pytest tests/examples/test_slurm.py"
_DAEMONSET, _SIDECAR = "examples/kubernetes/daemonset.yaml", "examples/kubernetes/sidecar.yaml"

DEPLOYING = (
    Mutant(
        "a thousand nodes storm a bucket that refuses them",
        "tierd/stores/window.py",
        "            self._resting_until = now + self._rng() * rest_s\n",
        "",
        "pytest tests/stores/test_slow_down.py",
    ),
    Mutant(
        "a request to Google or Azure reads the caller's buffer",
        _STORE,
        "name, copy = check_key(key), bytes(octets(data))",
        "name, copy = check_key(key), octets(data)",
        f"{_CLOUD} -k sends_a_copy",
    ),
    Mutant(
        "memory does not count the copy that a put sends",
        "tierd/stores/base.py",
        '    return int(getattr(store, "held", 1))\n',
        "    return 1\n",
        "pytest tests/stores/test_encrypted.py",
    ),
    Mutant(
        "obstore tries again by itself",
        _STORE,
        '{"max_retries": 0,',
        '{"max_retries": 2,',
        f"{_CLOUD} -k what_a_status_means",
    ),
    Mutant(
        "a key that is gone cannot be deleted from Google's bucket",
        _STORE,
        "                except ObjectNotFound:\n                    pass\n",
        "                except ObjectNotFound:\n                    raise\n",
        f"{_CLOUD} -k counts_as_deleted",
    ),
    Mutant(
        "a listing out of order is taken for whole",
        _STORE,
        "                if key <= last:\n",
        "                if False:\n",
        f"{_CLOUD} -k out_of_order",
    ),
    Mutant(
        "every listing of a bucket begins at its beginning",
        _STORE,
        "    return found if found and",
        "    return None if found and",
        f"{_CLOUD} -k without_listing_its_chunks",
    ),
    Mutant(
        "credentials that were refused are kept",
        _STORE,
        "answer.status in (401, 403):\n                self._store = None",
        "answer.status in (401, 403):\n                pass",
        f"{_CLOUD} -k read_again",
    ),
    Mutant(
        "a missing bucket is a missing object",
        _ANSWERS,
        'if code in _NO_BUCKET or (status == 404 and action in ("put", "scan")):',
        'if status == 404 and action in ("put", "scan"):',
        f"{_CLOUD} -k missing_bucket",
    ),
    Mutant(
        "a refused deletion is a refused tier",
        _ANSWERS,
        'if action == "delete" and status in',
        "if False and status in",
        "pytest tests/stores/test_cloud_answers.py -k refusal_to_delete",
    ),
    Mutant(
        "a server's words are shown",
        _ANSWERS,
        'return kind(f"{place}: {doing}: {shown or name}{advice}")',
        'return kind(f"{place}: {doing}: {shown or name}{advice} ({error})")',
        "pytest tests/stores/test_cloud_answers.py -k repeated",
    ),
    Mutant(
        "a process is aborted at its end by a thread of obstore's",
        _STORE,
        "@atexit.register\n",
        "",
        f"{_CLOUD} -k ends_as_it_should",
    ),
    Mutant(
        "a pod is killed while its daemon drains",
        _DAEMONSET,
        "terminationGracePeriodSeconds: 180",
        "terminationGracePeriodSeconds: 120",
        f"{_KUBERNETES} -k grace",
    ),
    Mutant(
        "the kubelet's probes are turned away",
        _SIDECAR,
        'listen = "0.0.0.0:9464"',
        'listen = "127.0.0.1:9464"',
        f"{_KUBERNETES} -k probes",
    ),
    Mutant(
        "a draining daemon is restarted by its probe",
        _DAEMONSET,
        "livenessProbe:\n            httpGet: {path: /healthz,",
        "livenessProbe:\n            httpGet: {path: /readyz,",
        f"{_KUBERNETES} -k probes",
    ),
    Mutant(
        "the tiers' outage drains every node of a cluster",
        "examples/slurm/prolog.sh",
        "if [ $? -eq 11 ]; then",
        "if [ $? -ne 0 ]; then",
        f"{_SLURM} -k drains_a_node",
    ),
    Mutant(
        "one job's end stops the daemon of another",
        "examples/slurm/epilog.sh",
        'rmdir "$jobs/$account" 2>/dev/null && systemctl stop',
        'rm -rf "$jobs/$account" && systemctl stop',
        f"{_SLURM} -k leaves_with_all",
    ),
    Mutant(
        "a job's ranks save different steps before its limit",
        "examples/slurm/train.py",
        "            dist.all_reduce(last, dist.ReduceOp.MAX)\n",
        "",
        f"{_SLURM} -k near_its_limit",
    ),
)
