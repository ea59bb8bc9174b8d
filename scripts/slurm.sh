#!/bin/bash
# One task per device; queued again when its time is up, and then goes on by itself:
#   sbatch scripts/slurm.sh model=resnet18                                           one task on one node
#   sbatch --nodes=2 --ntasks-per-node=4 --gpus-per-node=4 scripts/slurm.sh model=resnet18   a task for each of eight GPUs
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) # another job may have tasks on the same node
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python src/train.py strategy=ddp devices="$SLURM_NTASKS_PER_NODE" num_nodes="$SLURM_NNODES" "$@"
