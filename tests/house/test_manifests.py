"""The manifests for Kubernetes: they parse, start processes as the page says, and treat its exit codes so."""

from __future__ import annotations

import re
import subprocess

import pytest
import reading

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.house

FOLDER = reading.ROOT / "docs" / "kubernetes"
WORLD = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


SECRET = {"secretKeyRef": {"name": "run-a", "key": "secret"}}


def only_itself(policy, labels):
    """The policy lets in what has these labels alone."""
    pods = {"podSelector": {"matchLabels": labels}}
    assert policy["kind"] == "NetworkPolicy"
    assert policy["spec"] == {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}]}


def codes():
    """The exit codes in the page's table: what each says about starting again."""
    page = (reading.ROOT / "docs" / "hosts.md").read_text()
    return {int(code): again for code, again in re.findall(r"^\| (\d+) \| .* \| (\w[\w ]*) \|$", page, re.MULTILINE)}


def test_the_job():
    """Each pod has its index as its rank, and a name that the others reach; exit codes end the job or do not."""
    service, policy, job = yaml.safe_load_all((FOLDER / "job.yaml").read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    env = {item["name"]: item for item in container["env"]}
    assert tuple(env) == (*WORLD, "PHALANX_SECRET")
    assert env["PHALANX_SECRET"]["valueFrom"] == SECRET
    only_itself(policy, {"batch.kubernetes.io/job-name": job["metadata"]["name"]})
    assert env["RANK"]["valueFrom"]["fieldRef"]["fieldPath"] == INDEX
    assert (spec["completionMode"], pod["restartPolicy"], service["spec"]["clusterIP"]) == ("Indexed", "Never", "None")
    assert env["WORLD_SIZE"]["value"] == str(spec["completions"]) == str(spec["parallelism"])
    name = service["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert (pod["subdomain"], env["MASTER_ADDR"]["value"]) == (name, f"{job['metadata']['name']}-0.{name}")
    done = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    assert done == {1: "FailJob", 2: "FailJob", 3: "Count", 4: "FailJob", 75: "Ignore"}
    again = {code for code, word in codes().items() if word == "yes"}
    assert again == {code for code, action in done.items() if action != "FailJob"} == {3, 75}
    (rule,) = container["restartPolicyRules"]
    assert not set(rule["exitCodes"]["values"]) & (set(done) - again)


def test_the_train_job():
    """The command turns what the runtime gives into what phalanx reads."""
    policy, job = yaml.safe_load_all((FOLDER / "trainjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    only_itself(policy, {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]})
    trainer = job["spec"]["trainer"]
    assert trainer["env"] == [{"name": "PHALANX_SECRET", "valueFrom": SECRET}]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 1)
    *shell, line = trainer["command"]
    line = line.replace("exec phalanx", "exec env; exec phalanx")
    given = {
        "PET_NODE_RANK": "2",
        "PET_NNODES": "4",
        "PET_MASTER_ADDR": "run-a-node-0-0.run-a",
        "PET_MASTER_PORT": "29500",
    }
    done = subprocess.run([*shell, line], env={"PATH": "/usr/bin:/bin", **given}, capture_output=True, text=True)
    found = dict(word.split("=", 1) for word in done.stdout.splitlines())
    assert [found[name] for name in WORLD] == ["2", "4", "run-a-node-0-0.run-a", "29500"]
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
