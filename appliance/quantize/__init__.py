"""`appliance quantize`: an unquantised model folder becomes a GPTQ or AWQ one, calibrated, checked and compared."""
