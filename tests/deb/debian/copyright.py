"""Lists what the environment holds, with licences and where their texts lie."""

from importlib.metadata import distributions

HEAD = """Penstock, and the packages of others that its environment holds.

Files: *
License: Apache-2.0, /usr/share/common-licenses/Apache-2.0

The texts of all licences lie beside each package, at the paths below. The file penstock.cdx.json
beside Penstock's lists the packages with their hashes, as CycloneDX.
"""
TEXTS = ("license", "licence", "copying", "notice", "authors", "penstock.cdx.json")


def licence_of(facts):
    classified = [
        each.rpartition(" :: ")[2]
        for each in facts.get_all("Classifier") or ()
        if each.startswith("License :: ")
    ]
    said = facts.get("License-Expression") or ", ".join(classified) or facts.get("License") or ""
    return said.splitlines()[0] if said else "see its text"


print(HEAD)
for each in sorted(distributions(), key=lambda one: one.metadata["Name"].lower()):
    print(f"{each.metadata['Name']} {each.version}\nLicense: {licence_of(each.metadata)}")
    for file in each.files or ():
        if ".dist-info/" in str(file) and file.name.lower().startswith(TEXTS):
            print(f" {file.locate()}")
    print()
