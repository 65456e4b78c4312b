//! The program `offshoot`: volumes of btrfs and XFS from the command line.
//!
//! ```text
//! arguments -> session (devices, volume, subvolume) -> verb -> output
//! ```
//!
//! | module | what it does |
//! |---|---|
//! | [`allocator`] | where memory comes from |
//! | [`args`], [`place`], [`places`] | the command line, and the places in it |
//! | [`disk`] | what lies between a file and a volume: images, partitions |
//! | [`session`] | opening a volume |
//! | [`listed`] | the entries of a directory |
//! | [`permissions`], [`moments`] | modes and times as users write them |
//! | [`live`], [`rights`] | a volume that is open because it is mounted, and what its users may do |
//! | [`verbs`] | what each verb does; those of one format in a folder of their own |
//! | [`edit`] | changing volumes |
//! | [`mount`] | volumes as a part of the file system of the host |
//! | [`occupied`] | files and devices that are not overwritten because they hold a filesystem |
//! | [`stream`] | the contents of a file on standard output |
//! | [`workload`] | what the benchmarks do |
//! | [`interrupt`] | Ctrl-C during a long verb |
//! | [`output`], [`exit`] | what is printed, and the exit code |
//! | [`events`] | what the engine does, printed with `-v` |
//!
//! A verb writes to standard output and returns a failure. Only [`exit`] prints the failure and
//! chooses the exit code. If the reader of standard output closes it early, the program ends
//! without an error.

mod allocator;
mod args;
mod disk;
mod edit;
mod events;
mod exit;
mod interrupt;
mod listed;
mod live;
mod moments;
mod mount;
mod occupied;
mod output;
mod permissions;
mod place;
mod places;
mod rights;
mod session;
mod stream;
mod verbs;
mod workload;

use std::ffi::OsString;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use clap::error::ErrorKind;

use args::{Arguments, Verb};
use exit::{Result, VerbFailure};
use output::Console;
use verbs::btrfs::dropin;

fn main() -> ExitCode {
    allocator::return_memory();
    let words: Vec<OsString> = std::env::args_os().collect();
    if dropin::is_called(&words) {
        allocator::keep_memory();
        return dropin::main(&words);
    }
    let words = mount::with_verb(words);
    // `--json` counts even if the rest of the command line is wrong.
    let is_json = words.iter().take_while(|word| *word != "--").any(|word| word == "--json");
    let console = Arc::new(Console::new(is_json));
    let result = run(&words, &console);
    let code_for_mount = mount::exit_code(&result);
    let status = exit::report(result, &console);
    ExitCode::from(if mount::is_called_by_mount() { code_for_mount } else { status as u8 })
}

fn run(words: &[OsString], console: &Arc<Console>) -> Result {
    let mut arguments = match Arguments::try_parse_from(words) {
        Ok(arguments) => arguments,
        // Help and version are not errors: clap prints them to standard output.
        Err(message) if message.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return Err(VerbFailure::Usage(
                "the command is incomplete; --help shows what can follow".into(),
            ));
        }
        Err(message) if !message.use_stderr() => return Ok(message.print()?),
        Err(message) => return Err(VerbFailure::Usage(usage(&message))),
    };
    // These say how much memory they take.
    if !matches!(arguments.verb, Verb::Check(_) | Verb::Repair(_)) {
        allocator::keep_memory();
    }
    events::begin(arguments.settle_verbosity())?;
    let mut out = io::BufWriter::with_capacity(64 << 10, io::stdout().lock());
    match mount::mounted(&mut arguments.verb)? {
        Some(elsewhere) => elsewhere.run(&words[1..], &mut out, console),
        None => verbs::run_to(&arguments.verb, &mut out, console),
    }
}

/// The message of clap without the word with which our own messages begin, and without the tip that
/// takes an unknown option for the name of a file.
fn usage(message: &clap::Error) -> String {
    let text = message.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let is_told = |line: &&str| !line.trim_start().starts_with("tip: to pass");
    text.lines().filter(is_told).collect::<Vec<_>>().join("\n").trim_end().to_owned()
}
