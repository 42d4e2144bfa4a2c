"""Peak floating-point operations per second of accelerators, for model FLOPs utilization."""

from __future__ import annotations

import re

import torch

_HOPPER = "NVIDIA H100 Tensor Core GPU datasheet, https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "NVIDIA H200 datasheet, https://www.nvidia.com/en-us/data-center/h200/"
_BLACKWELL = "NVIDIA GB200 NVL72 and HGX B200 specifications, https://www.nvidia.com/en-us/data-center/gb200-nvl72/"
_VOLTA = "NVIDIA V100 datasheet, https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, Appendix A"
_ADA = "NVIDIA Ada GPU Architecture whitepaper, Appendix A"
_AMD = "AMD Instinct data sheets, https://www.amd.com/en/products/accelerators/instinct.html"

# Names as the driver gives them (a pattern for the whole name), dense operations per second in bfloat16 (in float16 for V100
# and T4, which have no bfloat16) with sums in float32, and where the number is stated. Makers often state the double, with
# sparsity. A name that is not here has no number: laptops, "Ti", "SUPER" and parts of a GPU (MIG) differ.
_PEAKS: tuple[tuple[str, float, str], ...] = (
    (r"NVIDIA GB200", 2500e12, _BLACKWELL),
    (r"NVIDIA B200", 2250e12, _BLACKWELL),
    (r"NVIDIA GH200( \d+GB)?", 989.4e12, "NVIDIA GH200 Grace Hopper Superchip datasheet"),
    (r"NVIDIA H200", 989.4e12, _H200),
    (r"NVIDIA H200 NVL", 835.5e12, _H200),
    (r"NVIDIA H100 80GB HBM3", 989.4e12, _HOPPER),
    (r"NVIDIA H100 NVL", 835.5e12, _HOPPER),
    (r"NVIDIA H100 PCIe", 756.5e12, _HOPPER),
    (
        r"(NVIDIA )?A100([- ](SXM4|PCIE|PCIe|SXM|80GB|40GB))*",
        312e12,
        "https://www.nvidia.com/en-us/data-center/a100/",
    ),
    (r"NVIDIA A40", 149.7e12, "NVIDIA A40 datasheet, https://www.nvidia.com/en-us/data-center/a40/"),
    (r"NVIDIA A30", 165e12, "NVIDIA A30 datasheet, https://www.nvidia.com/en-us/data-center/products/a30-gpu/"),
    (r"NVIDIA A10", 125e12, "NVIDIA A10 datasheet, https://www.nvidia.com/en-us/data-center/products/a10-gpu/"),
    (r"NVIDIA L40S", 362e12, "NVIDIA L40S datasheet, https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"),
    (r"NVIDIA L40", 181e12, "NVIDIA L40 datasheet, https://www.nvidia.com/en-us/data-center/l40/"),
    (r"NVIDIA L4", 121e12, "NVIDIA L4 datasheet, https://www.nvidia.com/en-us/data-center/l4/"),
    (r"(NVIDIA )?(Tesla )?V100-SXM[23]-\d+GB(-LS)?", 125e12, _VOLTA),
    (r"(NVIDIA )?(Tesla )?V100-PCIE-\d+GB", 112e12, _VOLTA),
    (r"(NVIDIA )?(Tesla )?T4", 65e12, "NVIDIA T4 datasheet, https://www.nvidia.com/en-us/data-center/tesla-t4/"),
    (r"NVIDIA RTX A6000", 154.8e12, _GA102),
    (r"NVIDIA GeForce RTX 3090", 71e12, _GA102),
    (r"NVIDIA GeForce RTX 4090", 165.2e12, _ADA),
    (r"NVIDIA GeForce RTX 5090", 209.5e12, "NVIDIA RTX Blackwell GPU Architecture whitepaper, Appendix A"),
    (r"AMD Instinct MI355X", 2516.6e12, _AMD),
    (r"AMD Instinct MI3(00|25)X", 1307.4e12, _AMD),
    (r"AMD Instinct MI250X", 191.5e12, _AMD + " (383 for its two devices)"),
    (r"AMD Instinct MI210", 181e12, _AMD),
)


def peak_flops(device: torch.device | str | None = None) -> float | None:
    """Peak FLOP/s: floating-point operations per second that a device's maker states, or None for an unknown device.

    >>> import looplib as ll
    >>> ll.log.peak_flops("NVIDIA A100-SXM4-80GB"), ll.log.peak_flops("NVIDIA A100-SXM4-40GB MIG 1g.5gb")
    (312000000000000.0, None)
    >>> ll.log.peak_flops("cpu") is None
    True

    These are dense operations (without sparsity) in bfloat16, or in float16 for V100 and T4, with sums in float32: the usual
    reference for model FLOPs utilization, whatever dtype a model trains in. Only names that are known as a whole have a number:
    GB200, B200, GH200, H200, H100, A100, A40, A30, A10, L40S, L40, L4, V100, T4, RTX A6000, GeForce RTX 3090, 4090 and 5090,
    and AMD's MI355X, MI325X, MI300X, MI250X and MI210. A number of your own goes into `step_timer(peak=...)`.

    Args:
        device: a device, or the name that its driver gives it. Defaults to the current accelerator.

    Returns:
        Operations per second, a float; None for any other device, such as a CPU, a laptop's GPU or a part of a GPU (MIG).

    Source: the makers' datasheets and whitepapers, named beside each number in `looplib/log/_peaks.py`.
    """
    name = _name_of(device)
    return next((peak for pattern, peak, _ in _PEAKS if re.fullmatch(pattern, name)), None)


def _name_of(device: torch.device | str | None) -> str:
    """The name that a driver gives, or "" for a device that has none."""
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            return str(device)  # a name
    chosen = torch.accelerator.current_accelerator(check_available=True) if device is None else device
    if chosen is None or chosen.type == "cpu":
        return ""
    name = getattr(torch.get_device_module(chosen), "get_device_name", None)
    return str(name(chosen)) if name is not None and torch.accelerator.is_available() else ""
