"""Generated files back to what they deploy: the inverse of the targets, for round trips and for manifests of others."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfcast_engine.errors import InvalidField, Reason, UnknownName

from perfcast_deploy import flags as flag_table
from perfcast_deploy.catalog import catalog, runtime_version, system_of
from perfcast_deploy.llmd import GATEWAYS
from perfcast_deploy.settings import nextn_of, role_of
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
            name: role_of(self.backend, self.roles[name], is_moe) | {"workers": self.workers[name]} for name in order
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
    found, front, hosts = Found(), {}, []
    for number in range(sum(bool(re.fullmatch(r"run_\d+\.sh", name)) for name in files)):
        for words in script_commands(files[f"run_{number}.sh"]):
            env = dict(word.split("=", 1) for word in itertools.takewhile(ASSIGNMENT.match, words))
            log = next((word for word in words if word.startswith("logs/")), "").removeprefix("logs/")
            role = log.partition("_")[0]
            hosts += [env["NODE_HOST"]] if "NODE_HOST" in env else []
            if "ENGINE_VERSION" in env:
                found.top["version"] = env["ENGINE_VERSION"]
            elif role in ("agg", "prefill", "decode"):
                rank = re.search(r"_rank(\d+)", log)
                found.add(role, words, files, 0 if rank and int(rank[1]) else 1)
                found.env |= env
                found.top["port"] = int(after(words, "--port"))
            elif log == "front.log":
                front = _front_port(words, files) | {"router": "cache_aware" in words}
    found.top |= front
    usual = ["127.0.0.1"] if len(hosts) == 1 else [f"node-{i}" for i in range(len(hosts))]
    found.cluster["hosts"] = [] if hosts == usual else hosts
    return found


def _front_port(words: Sequence[str], files: Mapping[str, str]) -> dict[str, int]:
    if "--port" in words:
        return {"port": int(after(words, "--port"))}
    if "front.yaml" in files:
        return {"port": int(one("front.yaml", files)["port"])}
    listen = re.search(r"listen (\d+);", files.get("front.conf", ""))
    return {"port": int(listen[1])} if listen else {}


def after(words: Sequence[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def one(name: str, files: Mapping[str, str]) -> dict[str, Any]:
    """The (last) document of a file."""
    return read_yaml(name, files[name])[-1]


def container_words(container: Mapping[str, Any]) -> list[str]:
    """The command line of a container; a shell in between is looked through."""
    words = [*map(str, container.get("command", ())), *map(str, container.get("args", ()))]
    if len(words) >= 3 and words[0].rpartition("/")[2] in ("bash", "sh") and words[1] in ("-c", "-lc"):
        words = next((command for command in reversed(script_commands(words[2])) if command), [])
        words = words[1:] if words[:1] == ["exec"] else words
    return words


def read_dynamo(files: Mapping[str, str]) -> Found:
    """A DynamoGraphDeployment with the ConfigMaps beside it."""
    documents = [d for name, text in files.items() if name.endswith((".yaml", ".yml")) for d in read_yaml(name, text)]
    graph = next((d for d in documents if d.get("kind") == "DynamoGraphDeployment"), None)
    if graph is None:
        raise InvalidField("manifest", "holds no DynamoGraphDeployment", "kind")
    configs = [d.get("data", {}) for d in documents if d.get("kind") == "ConfigMap"]
    engines = {name: text for data in configs for name, text in data.items()}
    found, router = Found(), False
    found.cluster |= {name: graph["metadata"].get(name) for name in ("name", "namespace")}
    for service in graph["spec"]["services"].values():
        pod = service.get("extraPodSpec", {})
        container = pod.get("mainContainer", {})
        words, kind = container_words(container), service.get("componentType")
        if kind == "frontend":
            if "--http-port" in words:
                found.top["port"] = int(after(words, "--http-port"))
            router = router or "--router-mode" in words
        elif kind == "worker":
            found.add(service.get("subComponentType") or "agg", words, engines, int(service.get("replicas", 1)))
            router = router or "--publish-events-and-metrics" in words
            _pod_facts(found, pod, container)
    found.top["router"] = router or found.top.get("router", False)
    return found


def _pod_facts(found: Found, pod: Mapping[str, Any], container: Mapping[str, Any]) -> None:
    """What a worker's pod says of the cluster, and its image of the engine's version, where we name it ourselves."""
    found.env |= {entry["name"]: entry["value"] for entry in container.get("env", ()) if "value" in entry}
    image = str(container.get("image", ""))
    version, system = runtime_version(found.backend, image), system_of(pod.get("nodeSelector", {}))
    found.top |= {"version": version} if version else {}
    found.top |= {"system": system} if system else {}
    found.cluster |= {} if version else {"image": image}
    for secret in pod.get("imagePullSecrets", ()):
        found.cluster["pull_secret"] = secret["name"]
    volumes = [volume for volume in pod.get("volumes", ()) if "persistentVolumeClaim" in volume]
    claims = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in volumes}
    for mount in container.get("volumeMounts", ()):
        if mount["name"] in claims:
            found.cluster |= {"pvc": claims[mount["name"]], "pvc_mount": mount["mountPath"]}


def read_helm(files: Mapping[str, str]) -> Found:
    """Values of the llm-d model service chart."""
    found, values = Found(), one("llm-d-values.yaml", files)
    artifacts = values["modelArtifacts"]
    named = [artifacts["uri"].removeprefix("hf://"), "--served-model-name", artifacts["name"]]
    for name in ("prefill", "decode"):
        entry = values[name]
        if not entry["create"]:
            continue
        container = entry["containers"][0]
        starts = ["vllm", "serve", *named] if container["modelCommand"] == "vllmServe" else container["command"]
        role = name if values["prefill"]["create"] else "agg"
        found.add(role, [*starts, *container["args"]], {}, entry["replicas"])
        _pod_facts(found, {}, container)
    found.top["port"] = values["routing"]["servicePort"]
    return _with_gateway(found, files)


def _with_gateway(found: Found, files: Mapping[str, str]) -> Found:
    """The address the benchmark job goes to, where it is not the one of the guides."""
    job = one("k8s_bench.yaml", files)["spec"]["template"]["spec"]["containers"][0]
    address = after(container_words(job), "--base-url")
    found.cluster["gateway"] = None if address in GATEWAYS.values() else address
    return found


def read_kustomize(files: Mapping[str, str]) -> Found:
    """A kustomization with one patch per role."""
    found, top = Found(), one("kustomization.yaml", files)
    names = [patch["path"] for patch in top["patches"]]
    for name in sorted(names, key=lambda path: "decode" in path):
        patch = one(name, files)
        container = patch["spec"]["template"]["spec"]["containers"][0]
        role = patch["metadata"]["name"] if len(names) > 1 else "agg"
        found.add(role, container_words(container), {}, patch["spec"]["replicas"])
        _pod_facts(found, {}, container)
    found.cluster |= {"namespace": top.get("namespace"), "name": top["namePrefix"].removesuffix("-")}
    return _with_gateway(found, files)


def read_fpm(files: Mapping[str, str]) -> Found:
    """Collection files: one folder per role, or one role without folder."""
    found = Found()
    for path in sorted((name for name in files if name.endswith("run.sh")), key=lambda name: "decode" in name):
        engine = next((line for line in files[path].splitlines() if line.startswith("engine=(")), "")
        words = shlex.split(engine.removeprefix("engine=(").removesuffix(")"))
        role = after(words, "--benchmark-mode")
        found.add(role, words, {})
        resource = one(f"{path.removesuffix('run.sh')}k8s_deploy.yaml", files)
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
