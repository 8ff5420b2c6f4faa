"""Action of k3.deploy.file_set: render templates and read files on the controller, then one module call."""

from __future__ import annotations

from pathlib import Path

from ansible.errors import AnsibleActionFail, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.template import trust_as_template


class ActionModule(ActionBase):
    """Turns C(template) and C(file) entries into C(content)."""

    def run(self, tmp=None, task_vars=None):
        super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        arguments["files"] = [self._with_content(entry, task_vars) for entry in arguments.get("files") or []]
        return self._execute_module(module_name="k3.deploy.file_set", module_args=arguments, task_vars=task_vars, tmp=tmp)

    def _with_content(self, entry, task_vars):
        entry = dict(entry)
        template, file = entry.pop("template", None), entry.pop("file", None)
        extra = entry.pop("vars", None) or {}
        try:
            if file:
                entry["content"] = Path(self._find_needle("files", file)).read_text(encoding="utf-8")
            elif template:
                source = Path(self._find_needle("templates", template))
                entry["content"] = self._render(source, {**task_vars, **extra})
        except AnsibleError as error:
            raise AnsibleActionFail(f"{entry.get('path')}: {error}") from error
        return entry

    def _render(self, source, variables):
        text = trust_as_template(source.read_text(encoding="utf-8"))
        templar = self._templar.copy_with_new_env(searchpath=[str(source.parent)], available_variables=variables)
        overrides = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
        return templar.template(text, escape_backslashes=False, overrides=overrides)
