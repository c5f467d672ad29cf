"""DeepSpeed's JSON files: their keys, what each key means here, reading one."""
