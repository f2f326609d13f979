"""One file per step of the pipeline: data in, frozen dataclass out."""
