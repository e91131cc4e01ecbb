def of(target): return []
