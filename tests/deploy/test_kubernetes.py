"""The Kubernetes manifest."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortolan.cli.serve import serve

pytestmark = pytest.mark.slow  # installs a validator

VALIDATOR = "kubernetes-validate==1.37.0"
READ = "import json, sys, yaml; print(json.dumps(list(yaml.safe_load_all(open(sys.argv[1])))))"
PROBES = {"startup": "/health/ready", "readiness": "/health/ready", "liveness": "/health/live"}


@pytest.fixture(scope="module")
def manifest(root: Path) -> Path:
    return root / "deploy" / "kubernetes.yaml"


@pytest.fixture(scope="module")
def objects(manifest: Path, tool: Callable[[str], Path]) -> dict[str, Any]:
    """The manifest's objects by their kinds."""
    python = tool(VALIDATOR) / "python"
    done = subprocess.run([python, "-c", READ, manifest], capture_output=True, check=True)
    return {one["kind"]: one for one in json.loads(done.stdout)}


def test_manifest_is_valid(manifest: Path, tool: Callable[[str], Path]) -> None:
    """By the published schemas, unknown fields refused: the API server drops those in silence."""
    done = subprocess.run(
        [tool(VALIDATOR) / "kubernetes-validate", "--strict", manifest],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_pod_outlives_its_own_shutdown(objects: dict[str, Any]) -> None:
    """The kubelet kills what outlasts its patience: answers would be cut that had time left."""
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    given = serve.make_context("serve", list(pod["containers"][0]["args"])).params
    assert given["drain_delay"] > 0
    assert pod["terminationGracePeriodSeconds"] > given["drain_delay"] + given["grace"]


def test_probes_ask_what_exists(objects: dict[str, Any]) -> None:
    """A liveness probe on readiness would kill every replica that drains or is stuck for a bit."""
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in PROBES}
    assert paths == PROBES
    names = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert names == {"http": 8000, "grpc": 50051}
    targets = {port["targetPort"] for port in objects["Service"]["spec"]["ports"]}
    assert targets == set(names)
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"].items() <= labels.items()


def test_pod_is_within_the_restricted_standard(objects: dict[str, Any]) -> None:
    """Clusters that enforce it would turn the pod away; the fields are its list."""
    pod = objects["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"] == container["resources"]["requests"]
    mounts = {
        mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]
    }
    assert mounts == {"/bundle": True, "/cache": False}
