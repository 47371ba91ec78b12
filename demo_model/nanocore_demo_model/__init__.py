"""nanocore's demo model: files in Hugging Face format beside this one, and no code.

`nanocore.demo_model.demo_model_folder` says where they are; nobody needs to import this package.
"""
