"""Families of KV-cache layouts, a module each: the formats' definitions as arithmetic. Pure."""
