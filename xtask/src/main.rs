//! Set-up, tests and benchmarks of offshoot: `cargo xtask TASK`.
//!
//! Every task is a list of commands that a person could type. It prints each command before it runs
//! it, and ends with the first one that fails. Continuous integration runs `cargo xtask test` like
//! every developer.

mod apt;
mod bench;
mod beside;
mod campaign;
mod columns;
mod counts;
mod demo;
mod floors;
mod licences;
mod man;
mod names;
mod setup;
mod shell;
mod sources;
mod speak;
mod test;

use std::process::ExitCode;

/// The command that makes the volume in `fixtures`.
const FIXTURE: [&str; 6] =
    ["run", "--quiet", "--package", "offshoot-testkit", "--example", "fixture"];

const HELP: &str = "\
Usage: cargo xtask TASK

Tasks:
  demo [--program FILE] [--dir DIRECTORY]
           Build the program, and show what it does on a volume of its own: fill, list, change,
           snapshot, mount, take out
  test     Run everything that has to pass: format, lints, floors, names, tests, licences. Says at
           once what it misses; the last line counts the tests: `N passed, N failed, N skipped`
  man [DIRECTORY]
           Write the man pages into DIRECTORY (target/man)
  setup    Install what the tests need (as root), or say how to; says first what it will change
  licences Check that everything that is linked is under a permissive licence
  floors   Check that no room of the engine calls one above it
  names    Check that each type name is defined once and says what the type is
  fixture  Make the carried volume anew with the kernel (as root)
  bench extract [--rounds N] [--source PATH]
           Take a whole volume out: offshoot, btrfs restore, the kernel (as root)
  bench build [--rounds N] [--source PATH]
           Build volumes from a directory, an archive and layers: offshoot, mkfs.btrfs, the kernel (as root)
  bench check [--files N] [--rounds N] [--source PATH] [--lowmem]
           Check large volumes: offshoot, btrfs check (as root)
  bench tree [--rounds N] [--items N]
           Insert into one tree with 1, 2 and 12 threads, with and without early unlock
  bench fs-mark [--threads N,N...] [--files N] [--rounds N] [--size BYTES] [--turns N]
           [--format btrfs|xfs] [--log-mib N] [--no-switches]
           Make many small files, by us and by the kernel (as root)
  bench enospc [--mib N] [--workers N] [--file-size BYTES] [--turns N]
           Make small files until there is no space, by us and by the kernel (as root)
  bench data [--groups GROUP,GROUP...] [--mib N] [--random-mib N] [--snapshots N] [--files N]
           [--turns N] [--no-proof] [--format btrfs|xfs]
           Write, read and clone large files and take snapshots, by us and by the kernel (as root)
  bench dir-fsync [--files N] [--deletes N] [--node-sizes BYTES,BYTES...] [--turns N]
           Sync a large directory by itself, by us and by the kernel (as root)
  bench fsync [--threads N,N...] [--fsyncs N] [--turns N] [--no-proof] [--format btrfs|xfs]
           Append to files and sync each, with 1 to 16 threads, by us and by the kernel (as root)
  bench members [--latency-us N] [--rate-mib N] [--fsyncs N] [--mib N] [--turns N]
           Sync and read over 1, 2 and 4 members that each take time
  bench scale [--groups GROUP,GROUP...] [--millions N,N...] [--no-kernel]
           The same work on volumes of several sizes, by us and by the kernel (as root)
  bench mount [--sides SIDE,SIDE...] [--loads LOAD,LOAD...] [--files N] [--rounds N] [--mib N]
           [--random-mib N] [--source PATH] [--turns N]
           What programs do on a mount: ours on either format, the kernel's btrfs and XFS, a null filesystem over our
           server and over the crate fuser (as root)
  campaign crash [--workloads one|two|long|brinks|faults|subvolumes|COUNT|one:N|two:N] [--judged-every N]
           [--seed N]
           Cut the power, or let requests fail, at every point of many workloads; the kernel judges one
           of 3,000 states, or of N
  campaign enospc [--seconds N] [--threads N] [--seed N]
           Let 64 threads work on full volumes of several kinds, for a minute on each
  campaign files [--files N] [--seed N]
           Make a million files with 1, 2 and 12 threads, and remove half of them
  campaign fits [--tib N]
           Fill volumes with small files, and one of 4 TiB with preallocated space; the kernel
           fills the same
  campaign mutants [--mutants N] [--structures TYPE,TYPE...] [--keep DIRECTORY] [--seed N]
           Write volumes of which one structure is damaged; the kernel and btrfs check judge
  campaign mount [--seconds N] [--seed N]
           Run fsx for five minutes, pjdfstest and real programs on mounts, with each compression and nodatacow
  campaign pingpong [--rounds N] [--seed N]
           Change volumes of every layout in turns with the kernel, each for four rounds
  campaign snapshots [--snapshots N] [--files N] [--seed N]
           Take ten thousand snapshots of as many files that change, and delete them
  campaign volumes
           Have the kernel take its turn on every volume in memory that a test leaves, not on one of 8
  campaign xfs-crash [--workloads one|two|long|mixed|faults|kernel|COUNT|NAME] [--shapes NAME,...]
           [--judged-every N] [--seed N]
           Cut the power at every point of many workloads on volumes of XFS; the kernel judges one
           of 500 states, or of N
  campaign xfs-hostile [--cases N] [--seed N]
           Run every operation and every verb that reads on thousands of damaged volumes of XFS
  campaign xfs-large [--number N]
           Read a directory of a million names, a file of as many extents, and three thousand
           attributes, as the kernel shows them
  campaign xfs-pingpong [--rounds N] [--seed N]
           Change XFS volumes of every kind in turns with the kernel, each for six rounds; some turns
           end as by a power cut
  campaign xfs-recovery [--workloads N] [--cuts N] [--seed N]
           Record what the kernel writes to volumes of XFS, cut it at thousands of points, and recover
           each cut as the kernel does
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match args[..] {
        ["demo", ref options @ ..] => demo::demo(options),
        ["test"] => return test::test(),
        ["man"] => man::man("target/man"),
        ["man", directory] => man::man(directory),
        ["setup"] => setup::setup(),
        ["licences"] => licences::check(),
        ["floors"] => floors::check(),
        ["names"] => names::check(),
        ["fixture"] => shell::cargo(&FIXTURE),
        ["bench", what, ref options @ ..] => bench::bench(what, options),
        ["campaign", what, ref options @ ..] => campaign::campaign(what, options),
        ["help" | "-h" | "--help"] => {
            print!("{HELP}");
            Ok(())
        }
        _ => {
            eprint!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("xtask: {reason}");
            ExitCode::FAILURE
        }
    }
}
