"""What other libraries bring, made to work with this one."""
