"""Settings of DeepSpeed for other precisions and for ZeRO."""

from __future__ import annotations

BF16 = {"bf16": {"enabled": True}}
#: DeepSpeed's bf16 optimizer, which is partitioned over the pipelines.
BF16_ZERO = {**BF16, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}
#: With ZeRO iterations overflow, and are left out, until the scale is small enough.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}}
#: Without ZeRO DeepSpeed 0.19 divides gradients by a scale that it has not multiplied losses by.
FP16_SMALL = {"fp16": {**FP16["fp16"], "initial_scale_power": 4}}
FP16_ZERO = {**FP16, "zero_optimization": {"stage": 1}}
FP16_STATIC = {"fp16": {"enabled": True, "loss_scale": 128.0}}
FP32_ZERO = {"zero_optimization": {"stage": 1}}
BF16_ZERO_BF16 = {**BF16, "zero_optimization": {"stage": 1}}
