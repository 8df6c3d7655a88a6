"""`python -m appliance` is the command `appliance`."""

from appliance.cli import main

if __name__ == "__main__":
    main()
