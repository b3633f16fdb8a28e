"""Generated files back to what they deploy: the inverse of the targets, for round trips and for manifests of others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfcast_engine.errors import InvalidField, Reason, UnknownName

from perfcast_deploy import flags as flag_table
from perfcast_deploy.catalog import catalog, runtime_version
from perfcast_deploy.llmd import GATEWAYS
from perfcast_deploy.plan import nextn_of, role_facts
from perfcast_deploy.validate import read_yaml

ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")


@dataclass
class Found:
    """What files say: the roles' engine parameters, and the facts around them under the names of ``Deployment``."""

    backend: str = ""
    roles: dict[str, dict[str, Any]] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    cluster: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def add(self, role: str, words: Sequence[str], engines: Mapping[str, str], count: int = 1) -> None:
        """Take in one command line of a worker."""
        backend, flags, positional = read_command(words)
        self.backend = self.backend or backend
        if backend != self.backend:
            raise InvalidField("command", f"mixes {self.backend} and {backend}", "backend")
        params = flag_table.params_of(backend, flags)
        file = flags.get("extra-engine-args") or flags.get("extra_llm_api_options") or flags.get("config")
        if backend == "trtllm" and file:
            name = str(file).rpartition("/")[2]
            if name not in engines:
                raise InvalidField("extra-engine-args", f"the engine file {name} is not among the files", "missing")
            params |= flag_table.params_of_file(read_yaml(name, engines[name])[0], name)
        if role in self.roles and self.roles[role] != params:
            raise InvalidField(f"roles.{role}", "its workers are started with different settings", "mixed")
        self.roles[role] = params
        self.workers[role] = self.workers.get(role, 0) + count
        model = flags.get("model-path") or flags.get("model") or next(iter(positional), None)
        self.top.setdefault("model", model)
        self.top.setdefault("served_name", flags.get("served-model-name") or self.top["model"])
        self.top["router"] = self.top.get("router", False) or "kv-events-config" in flags

    def role_fields(self, is_moe: bool | None) -> dict[str, dict[str, Any]]:
        """Fields of ``Role`` by role name."""
        order = [name for name in ("agg", "prefill", "decode") if name in self.roles]
        return {
            name: role_facts(self.backend, self.roles[name], is_moe) | {"workers": self.workers[name]} for name in order
        }

    @property
    def nextn(self) -> int:
        return max((nextn_of(params) for params in self.roles.values()), default=0)


def read_command(words: Sequence[str]) -> tuple[str, dict[str, Any], list[str]]:
    """(backend, flags, positional words) of an engine's command line; assignments and MPI launchers are passed over."""
    rest = [word for i, word in enumerate(words) if not all(ASSIGNMENT.match(w) for w in words[: i + 1])]
    if rest[:1] == ["mpirun"]:
        rest = rest[rest.index("trtllm-llmapi-launch") + 1 :] if "trtllm-llmapi-launch" in rest else rest
    rest = rest[: next((i for i, word in enumerate(rest) if word in (">", "&", "2>&1", "|")), len(rest))]
    starts: Mapping[tuple[str, ...], str] = {
        ("vllm", "serve"): "vllm",
        ("-m", "vllm.entrypoints.openai.api_server"): "vllm",
        ("-m", "sglang.launch_server"): "sglang",
        ("sglang", "serve"): "sglang",
        ("trtllm-serve",): "trtllm",
    } | {("-m", facts["module"]): name for name, facts in catalog()["backends"].items()}
    body = rest[1:] if rest and rest[0].rpartition("/")[2].startswith("python") else rest
    for start, backend in starts.items():
        if tuple(body[: len(start)]) == start:
            flags, positional = flag_table.read_argv(backend, body[len(start) :])
            return backend, flags, positional
    known = (" ".join(start) for start in starts)
    raise UnknownName("engine command", " ".join(rest[:3]), known, Reason.INVALID_FIELD)


def script_commands(text: str) -> list[list[str]]:
    """Commands of a script as words, continuation lines joined; lines that are no plain command are passed over."""
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        try:
            commands.append(shlex.split(line, comments=True))
        except ValueError:
            continue
    return commands


def read_engine(files: Mapping[str, str]) -> Found:
    """Plain engine commands: run_<node>.sh."""
    found = Found()
    hosts: list[str] = []
    front: dict[str, Any] = {}
    for number in range(sum(bool(re.fullmatch(r"run_\d+\.sh", name)) for name in files)):
        for words in script_commands(files[f"run_{number}.sh"]):
            env = dict(
                word.split("=", 1) for word in words if ASSIGNMENT.match(word) and "/" not in word.partition("=")[0]
            )
            log = next((word for word in words if word.startswith("logs/")), "").removeprefix("logs/")
            role = log.partition("_")[0]
            if "NODE_HOST" in env and len(words) == 1:
                hosts.append(env["NODE_HOST"])
            elif "ENGINE_VERSION" in env and len(words) == 1:
                found.top["version"] = env["ENGINE_VERSION"]
            elif role in ("agg", "prefill", "decode"):
                rank = re.search(r"_rank(\d+)", log)
                found.add(role, words, files, 0 if rank and int(rank[1]) else 1)
                leading = words[: next((i for i, word in enumerate(words) if not ASSIGNMENT.match(word)), 0)]
                found.env |= dict(word.split("=", 1) for word in leading)
                found.top["port"] = int(words[words.index("--port") + 1])
            elif log == "front.log":
                front = _front_port(words, files) | {"router": "cache_aware" in words}
    found.top |= front
    found.cluster["hosts"] = hosts
    return found


def _front_port(words: Sequence[str], files: Mapping[str, str]) -> dict[str, int]:
    if "--port" in words:
        return {"port": int(words[words.index("--port") + 1])}
    if "front.yaml" in files:
        return {"port": int(read_yaml("front.yaml", files["front.yaml"])[0]["port"])}
    listen = re.search(r"listen (\d+);", files.get("front.conf", ""))
    return {"port": int(listen[1])} if listen else {}


def container_words(container: Mapping[str, Any]) -> list[str]:
    """The command line of a container; a shell in between is looked through."""
    words = [*map(str, container.get("command", ())), *map(str, container.get("args", ()))]
    if len(words) >= 3 and words[0].rpartition("/")[2] in ("bash", "sh") and words[1] in ("-c", "-lc"):
        commands = script_commands(words[2])
        words = next((command for command in reversed(commands) if command), [])
        words = words[1:] if words[:1] == ["exec"] else words
    return words


def _image(found: Found, image: str) -> None:
    """An image that we name ourselves says the engine version; any other is kept as it is."""
    version = runtime_version(found.backend, image)
    if version:
        found.top["version"] = version
    else:
        found.cluster["image"] = image


def read_dynamo(files: Mapping[str, str]) -> Found:
    """A DynamoGraphDeployment with the ConfigMaps beside it."""
    documents = [d for name, text in files.items() if name.endswith((".yaml", ".yml")) for d in read_yaml(name, text)]
    graph = next((d for d in documents if d.get("kind") == "DynamoGraphDeployment"), None)
    if graph is None:
        raise InvalidField("manifest", "holds no DynamoGraphDeployment", "kind")
    engines = {
        name: text for d in documents if d.get("kind") == "ConfigMap" for name, text in d.get("data", {}).items()
    }
    found = Found()
    found.cluster |= {name: graph["metadata"].get(name) for name in ("name", "namespace")}
    for service in graph["spec"]["services"].values():
        pod = service.get("extraPodSpec", {})
        container = pod.get("mainContainer", {})
        if service.get("componentType") == "frontend":
            words = container_words(container)
            if "--http-port" in words:
                found.top["port"] = int(words[words.index("--http-port") + 1])
            found.top["router"] = "--router-mode" in words
        if service.get("componentType") != "worker":
            continue
        words, router = container_words(container), found.top.get("router", False)
        found.add(service.get("subComponentType") or "agg", words, engines, int(service.get("replicas", 1)))
        found.top["router"] = router or "--publish-events-and-metrics" in words or found.top["router"]
        _pod_facts(found, pod, container)
    return found


def _pod_facts(found: Found, pod: Mapping[str, Any], container: Mapping[str, Any]) -> None:
    found.env |= {entry["name"]: entry["value"] for entry in container.get("env", ()) if "value" in entry}
    _image(found, str(container.get("image", "")))
    for secret in pod.get("imagePullSecrets", ()):
        found.cluster["pull_secret"] = secret["name"]
    claims = {
        v["name"]: v["persistentVolumeClaim"]["claimName"]
        for v in pod.get("volumes", ())
        if "persistentVolumeClaim" in v
    }
    for mount in container.get("volumeMounts", ()):
        if mount["name"] in claims:
            found.cluster |= {"pvc": claims[mount["name"]], "pvc_mount": mount["mountPath"]}


def read_helm(files: Mapping[str, str]) -> Found:
    """Values of the llm-d model service chart."""
    found, values = Found(), read_yaml("llm-d-values.yaml", files["llm-d-values.yaml"])[0]
    artifacts = values["modelArtifacts"]
    paired = values["prefill"]["create"]
    for name in ("prefill", "decode"):
        entry = values[name]
        if not entry["create"]:
            continue
        container = entry["containers"][0]
        words = [*container.get("command", ()), *container["args"]]
        if container["modelCommand"] == "vllmServe":
            words = [
                "vllm",
                "serve",
                artifacts["uri"].removeprefix("hf://"),
                "--served-model-name",
                artifacts["name"],
                *words,
            ]
        found.add(name if paired else "agg", words, {}, entry["replicas"])
        _pod_facts(found, {}, container)
    found.top["port"] = values["routing"]["servicePort"]
    _gateway(found, files)
    return found


def _gateway(found: Found, files: Mapping[str, str]) -> None:
    """The address the benchmark job goes to, where it is not the one of the guides."""
    job = read_yaml("k8s_bench.yaml", files["k8s_bench.yaml"])[0]
    words = container_words(job["spec"]["template"]["spec"]["containers"][0])
    address = words[words.index("--base-url") + 1]
    found.cluster["gateway"] = None if address in GATEWAYS.values() else address


def read_kustomize(files: Mapping[str, str]) -> Found:
    """A kustomization with one patch per role."""
    found, top = Found(), read_yaml("kustomization.yaml", files["kustomization.yaml"])[0]
    names = [patch["path"] for patch in top["patches"]]
    for name in sorted(names, key=lambda path: "decode" in path):
        patch = read_yaml(name, files[name])[0]
        container = patch["spec"]["template"]["spec"]["containers"][0]
        role = patch["metadata"]["name"]
        found.add(role if len(names) > 1 else "agg", container_words(container), {}, patch["spec"]["replicas"])
        _pod_facts(found, {}, container)
    found.cluster |= {"namespace": top.get("namespace"), "name": top["namePrefix"].removesuffix("-")}
    _gateway(found, files)
    return found


def read_fpm(files: Mapping[str, str]) -> Found:
    """Collection files: one folder per role, or one role without folder."""
    found = Found()
    for path in sorted((name for name in files if name.endswith("run.sh")), key=lambda name: "decode" in name):
        folder = path.removesuffix("run.sh")
        engine = next((line for line in files[path].splitlines() if line.startswith("engine=(")), "")
        words = shlex.split(engine.removeprefix("engine=(").removesuffix(")"))
        role = words[words.index("--benchmark-mode") + 1]
        found.add(role, words, {})
        resource = read_yaml(f"{folder}k8s_deploy.yaml", files[f"{folder}k8s_deploy.yaml"])[-1]
        metadata, pod = resource["metadata"], resource["spec"]
        if resource["kind"] == "LeaderWorkerSet":
            pod = pod["leaderWorkerTemplate"]["workerTemplate"]["spec"]
        _pod_facts(found, pod, pod["containers"][0])
        exports = [w[1].split("=", 1) for w in script_commands(files[path]) if w[:1] == ["export"]]
        found.env |= {name: value for name, value in exports if not name.startswith("DYN_FPM_")}
        found.cluster |= {"name": metadata["name"].removesuffix(f"-{role}"), "namespace": metadata.get("namespace")}
    return found


READERS: Mapping[str, Callable[[Mapping[str, str]], Found]] = {
    "engine": read_engine,
    "dynamo": read_dynamo,
    "llm-d-helm": read_helm,
    "llm-d-kustomize": read_kustomize,
    "fpm": read_fpm,
}
