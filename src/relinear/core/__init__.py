"""Values and files that everything else is built on: nothing here imports more of relinear than its errors,
forms and file helpers."""
