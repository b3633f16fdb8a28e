"""Data of perfcast: GPU systems (``gpus/*.yaml``), model figures, rules, measured tables (``packs/``), and how packs
are read (``pack``) and made (``build``)."""

from pathlib import Path

ROOT = Path(__file__).parent
