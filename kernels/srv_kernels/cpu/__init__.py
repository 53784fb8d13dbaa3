"""Op variants for host processors."""
