//! Benchmarks: programs that print a table and write JSON.
//!
//! A figure of one side alone says little: machines differ and days differ. Every
//! benchmark runs the sides in turns in one run, with cold caches, and prints all of
//! them; what counts is the ratio. No test asserts a time.
//!
//! | module | what it does |
//! |---|---|
//! | `measure` | one run of a program: time, CPU, memory |
//! | `table` | medians of several runs as text and as JSON |
//! | `volumes` | the input: volumes that the kernel filled with a source tree |
//! | `extract` | a whole volume into a directory and into a tar stream |

mod extract;
mod measure;
mod table;
mod volumes;

use std::path::PathBuf;
use std::process::ExitCode;

/// The outcome of everything here: a failure is a line for the user.
type Result<T = ()> = std::result::Result<T, String>;

const HELP: &str = "\
Usage: offshoot-bench extract --offshoot PROGRAM --dir DIR [OPTIONS]

Options:
  --offshoot PROGRAM  The program to measure, built with optimisation
  --dir DIR           Where volumes and output go, on the disk to measure: 3 GiB,
                      and 8 GiB for each round until all are done
  --source PATH       A directory or a tar archive to fill the volumes with
                      [default: /usr/src/linux-source-6.1.tar.xz]
  --rounds N          How often each side runs [default: 3]
";

/// What the command line asks for.
struct Options {
    offshoot: PathBuf,
    dir: PathBuf,
    source: PathBuf,
    rounds: usize,
}

fn main() -> ExitCode {
    let Some(options) = parse(std::env::args().skip(1)) else {
        eprint!("{HELP}");
        return ExitCode::from(2);
    };
    match extract::benchmark(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("offshoot-bench: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Option<Options> {
    if args.next()? != "extract" {
        return None;
    }
    let (mut offshoot, mut dir, mut rounds) = (None, None, 3);
    let mut source = PathBuf::from("/usr/src/linux-source-6.1.tar.xz");
    while let Some(name) = args.next() {
        let value = args.next()?;
        match name.as_str() {
            "--offshoot" => offshoot = Some(PathBuf::from(value)),
            "--dir" => dir = Some(PathBuf::from(value)),
            "--source" => source = PathBuf::from(value),
            "--rounds" => rounds = value.parse().ok().filter(|&rounds| rounds > 0)?,
            _ => return None,
        }
    }
    Some(Options { offshoot: offshoot?, dir: dir?, source, rounds })
}
