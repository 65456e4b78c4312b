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
//! | `tree` | many threads insert into one tree |

mod extract;
mod measure;
mod table;
mod tree;
mod volumes;

use std::path::PathBuf;
use std::process::ExitCode;

/// The outcome of everything here: a failure is a line for the user.
type Result<T = ()> = std::result::Result<T, String>;

const HELP: &str = "\
Usage: offshoot-bench extract --offshoot PROGRAM --dir DIR [OPTIONS]
       offshoot-bench tree [--dir DIR] [--rounds N] [--items N]

Options:
  --offshoot PROGRAM  The program to measure, built with optimisation
  --dir DIR           Where volumes and output go, on the disk to measure: 3 GiB,
                      and 8 GiB for each round until all are done
  --source PATH       A directory or a tar archive to fill the volumes with
                      [default: /usr/src/linux-source-6.1.tar.xz]
  --rounds N          How often each side runs [default: 3]
  --items N           Items to insert into a tree [default: 1000000]
";

/// What the command line asks for.
struct Options {
    offshoot: PathBuf,
    dir: PathBuf,
    source: PathBuf,
    rounds: usize,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.split_first() {
        Some((what, args)) if what == "extract" => {
            parse(args.iter().cloned()).map(|options| extract::benchmark(&options))
        }
        Some((what, args)) if what == "tree" => tree::benchmark(args),
        _ => None,
    };
    let Some(done) = done else {
        eprint!("{HELP}");
        return ExitCode::from(2);
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("offshoot-bench: {reason}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut args: impl Iterator<Item = String>) -> Option<Options> {
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
