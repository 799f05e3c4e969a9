"""Steps on other machines, over a file system that all of them see: SLURM by submitit, or Ray."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sightline.core.errors import InputError
from sightline.studies.commands import Machine
from sightline.studies.folders import StepFolder
from sightline.studies.running import Ended, Executor, Job, ticket
from sightline.studies.worker import work_off

CLUSTERS = ("slurm", "ray")


def on_cluster(name: str, machine: Machine, places: int, folder: Path, settings: Mapping[str, Any]) -> Executor:
    """Where `--on` says; `settings` are the cluster's own: account, timeout_min, address, num_gpus, …"""
    if name == "slurm":
        return Submitit(machine, places, folder, settings)
    if name == "ray":
        return Ray(machine, places, settings)
    raise InputError(f"Steps cannot run on {name!r}; choose from {', '.join(CLUSTERS)}")


class Submitted:
    """What submitit runs: a step, which goes on where it was if the job is preempted or reaches its time limit."""

    def __call__(self, work: Mapping[str, Any]) -> dict[str, str]:
        return work_off(work)

    def checkpoint(self, work: Mapping[str, Any]) -> Any:
        """Queue the same again; all that is needed lies in the step's folder."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, work)


class Submitit:
    """One SLURM job for each step; with `cluster=local` a process of this machine in its place."""

    def __init__(self, machine: Machine, places: int, folder: Path, settings: Mapping[str, Any]) -> None:
        try:
            import submitit
        except ImportError as error:
            raise InputError("--on slurm needs submitit: pip install 'sightline[slurm]'") from error
        settings = {"timeout_min": 24 * 60, **settings}
        cluster = settings.pop("cluster", "slurm")
        try:
            self.executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
            shared = ("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node", "name")
            named = {key if key in shared else f"{cluster}_{key}": value for key, value in settings.items()}
            self.executor.update_parameters(**{"name": "sightline", **named})
        except (RuntimeError, ValueError, NameError, TypeError) as error:
            raise InputError(f"SLURM cannot be used here: {error}") from error
        self.machine, self.places = machine, places

    def start(self, placed: StepFolder, folders: Mapping[str, Path]) -> Job:
        return _Queued(self.executor.submit(Submitted(), ticket(placed, folders, self.machine)))

    def close(self) -> None:
        """Jobs end by themselves."""


@dataclass(frozen=True)
class _Queued:
    job: Any

    def ended(self) -> Ended | None:
        if not self.job.done():
            return None
        from submitit.core.utils import FailedJobError, UncompletedJobError

        try:
            return Ended(**self.job.result())
        except (UncompletedJobError, FailedJobError) as error:
            return Ended("lost", str(error).strip().splitlines()[0])

    def stop(self) -> None:
        self.job.cancel(check=False)


class Ray:
    """One task of Ray for each step."""

    def __init__(self, machine: Machine, places: int, settings: Mapping[str, Any]) -> None:
        try:
            import ray
        except ImportError as error:
            raise InputError("--on ray needs Ray: pip install 'sightline[ray]'") from error
        settings = dict(settings)
        self.began = not ray.is_initialized()
        if self.began:
            options = {"address": settings.pop("address")} if "address" in settings else {}
            ray.init(log_to_driver=False, include_dashboard=False, **options)
        resources = {"num_cpus": 1, **settings}
        self.task = ray.remote(max_retries=0, **resources)(work_off)  # a lost one is started again by us
        self.machine, self.places = machine, places

    def start(self, placed: StepFolder, folders: Mapping[str, Path]) -> Job:
        return _Task(self.task.remote(ticket(placed, folders, self.machine)))

    def close(self) -> None:
        """Leave a cluster that was joined, end one that was begun."""
        import ray

        if self.began:
            ray.shutdown()


@dataclass(frozen=True)
class _Task:
    task: Any

    def ended(self) -> Ended | None:
        import ray

        if not ray.wait([self.task], timeout=0)[0]:
            return None
        try:
            return Ended(**ray.get(self.task))
        except ray.exceptions.TaskCancelledError:
            return Ended("stopped")
        except ray.exceptions.RayError as error:
            return Ended("lost", type(error).__name__)

    def stop(self) -> None:
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.cancel(self.task)
