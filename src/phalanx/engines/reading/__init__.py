"""Reading ahead: processes that read the shares of the next steps while others compute."""
