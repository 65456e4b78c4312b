//! `offshoot completions`: writes what a shell needs to complete command lines.

use std::io::Write;

use clap::{Command, CommandFactory};

use crate::args::{Arguments, CompletionsArguments};
use crate::exit::Result;

pub(super) fn run(arguments: &CompletionsArguments, out: &mut dyn Write) -> Result {
    let mut script = Vec::new();
    let mut command = shown(&Arguments::command());
    clap_complete::generate(arguments.shell, &mut command, "offshoot", &mut script);
    Ok(out.write_all(&script)?)
}

/// `command` without its hidden parts, because shells would offer those too.
fn shown(command: &Command) -> Command {
    let arguments = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set());
    let about = command.get_about().cloned().unwrap_or_default();
    Command::new(command.get_name().to_owned())
        .about(about)
        .disable_help_flag(command.is_disable_help_flag_set())
        .visible_aliases(command.get_visible_aliases().map(str::to_owned).collect::<Vec<_>>())
        .args(arguments.cloned())
        .subcommands(verbs.map(shown))
}
