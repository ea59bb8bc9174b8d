"""Show two ways in which the same convolution takes another algorithm, and so may have other bits, on one GPU:

    python scripts/lab/gpu_traps.py                  # on a GPU, seconds
    python scripts/lab/gpu_traps.py --device=cpu     # a rehearsal

1. **Alignment.** cuDNN's heuristics read how pointers are aligned. Weights that lie 4 bytes further on, as views of a
   flat buffer do, may run another engine. Each layout of Lockstep computes with aligned weights and samples
   (tests/strategies/test_ranks_alignment.py).
2. **Memory.** A plan for which there is no memory is skipped, and the next one is kept for later calls.
Both are controls: they say whether the trap is there on this card, with deterministic kernels and without TF32.
Exit codes: 0 both were tried, 1 an error.
"""

import argparse
import json
import subprocess
import sys
from hashlib import sha256

import torch
from torch.nn.functional import conv2d

SHAPES = [  # images, channels, size, filters, kernel
    (16, 3, 32, 64, 3),
    (16, 64, 32, 64, 3),
    (16, 64, 32, 128, 1),
    (8, 128, 16, 256, 3),
    (8, 256, 8, 512, 1),
    (128, 1, 28, 32, 3),
    (16, 3, 64, 768, 16),
]
DTYPES = (torch.float32, torch.bfloat16)
OFFSET = 4  # bytes
TIGHT_MIB = 16


def moved(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """Return a copy whose memory begins `offset` bytes behind an aligned address."""
    elements = offset // tensor.element_size()
    flat = torch.empty(tensor.numel() + elements, dtype=tensor.dtype, device=tensor.device)
    return flat[elements:].view(tensor.shape).copy_(tensor)


def passes(images: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Return the output of a convolution and the gradients of images and weights."""
    images, weights = images.detach().requires_grad_(), weights.detach().requires_grad_()
    output = conv2d(images, weights, padding=weights.shape[-1] // 2)
    output.backward(torch.ones_like(output))
    assert images.grad is not None
    assert weights.grad is not None
    return [output.detach(), images.grad, weights.grad]


def example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random images and weights, the same at each call."""
    count, channels, size, filters, kernel = shape
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, channels, size, size, generator=generator).to(device, dtype)
    weights = torch.randn(filters, channels, kernel, kernel, generator=generator).to(device, dtype)
    return images, weights


def differences(first: list[torch.Tensor], second: list[torch.Tensor]) -> str:
    """Name what has other bits."""
    names = ("output", "gradient of images", "gradient of weights")
    return ", ".join(name for name, a, b in zip(names, first, second, strict=True) if not torch.equal(a, b))


def digest_of(tensors: list[torch.Tensor]) -> str:
    """Return the SHA-256 of the bytes of some tensors."""
    return sha256(b"".join(tensor.cpu().view(torch.uint8).numpy().tobytes() for tensor in tensors)).hexdigest()


def with_little_memory(case: tuple[tuple[int, ...], torch.dtype], device: torch.device) -> str | None:
    """Return the digest of a convolution that may take `TIGHT_MIB` beside what it needs. None: it does not fit."""
    images, weights = example(*case, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        needed = torch.cuda.memory_reserved() + 4 * images.nbytes + 4 * weights.nbytes + (TIGHT_MIB << 20)
        torch.cuda.set_per_process_memory_fraction(needed / torch.cuda.get_device_properties(device).total_memory)
    try:
        return digest_of(passes(images, weights))
    except torch.OutOfMemoryError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tight", action="store_true", help="print digests, computed with little memory left")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cudnn.allow_tf32 = False
    cases = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    if options.tight:
        print(json.dumps([with_little_memory(case, device) for case in cases]))
        return 0
    first = {case: passes(*example(*case, device)) for case in cases}

    repeated = sum(bool(differences(first[case], passes(*example(*case, device)))) for case in cases)
    shifted = 0
    for case in cases:
        images, weights = example(*case, device)
        if text := differences(first[case], passes(images, moved(weights, OFFSET))):
            shifted += 1
            print(f"weights {OFFSET} bytes further on: {case}: {text}")

    command = [sys.executable, __file__, f"--device={device}", "--tight"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    tight = json.loads(answer.splitlines()[-1])  # in a process of its own, which has kept no plan yet
    other_bits = sum(digest not in (None, digest_of(first[case])) for case, digest in zip(cases, tight, strict=True))
    print(
        f"of {len(cases)} convolutions have other bits: {repeated} when they are repeated, {shifted} with weights "
        f"{OFFSET} bytes further on, {other_bits} with {TIGHT_MIB} MiB to spare ({tight.count(None)} do not fit)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
