"""A run as a function that Ray Train calls in each of two workers on CPUs:  python ray_program.py <overrides>

Ray has started the workers and made their process group before it calls the function.
"""

import sys
import tempfile

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def run(config: dict[str, list[str]]) -> None:
    import lockstep

    lockstep.train(lockstep.compose(*config["overrides"]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="lockstep_ray_") as folder:  # short: Ray's sockets are in it
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder)
        try:
            TorchTrainer(
                run,
                train_loop_config={"overrides": sys.argv[1:]},
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(storage_path=folder),
            ).fit()
        finally:
            ray.shutdown()  # before its folder goes: its processes write there
