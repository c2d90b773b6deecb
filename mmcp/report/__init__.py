"""What people see: tables, figures, pages, and the doctor."""
