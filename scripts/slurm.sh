#!/bin/bash
# One worker for each task; queued again when its time is up, and then continues by itself.
#   sbatch scripts/slurm.sh model=resnet18                                      two workers on CPUs of one node
#   sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 scripts/slurm.sh model=resnet18
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
srun ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} python src/train.py strategy=ddp "$@"
