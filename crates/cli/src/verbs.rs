//! The implementation of each verb.

mod below;
pub(crate) mod bench;
pub(crate) mod btrfs;
pub(crate) mod build;
mod cat;
mod chattr;
mod check;
mod chmod;
mod chown;
mod completions;
mod cp;
mod dedupe;
mod df;
mod disk_info;
mod du;
mod dump;
mod extract;
mod fallocate;
mod fattr;
mod fields;
mod find;
mod info;
mod ln;
mod ls;
mod lsattr;
mod man;
mod mkdir;
pub(crate) mod mkfs;
mod mknod;
mod mv;
mod property;
mod repair;
mod rescue;
mod resize;
mod rm;
mod rmdir;
mod stat;
pub(crate) mod statistics;
mod stats;
mod sync;
mod touch;
mod tree;
mod trim;
mod truncate;
mod xfs;

use std::io::Write;
use std::sync::Arc;

use crate::args::Verb;
use crate::exit::Result;
use crate::mount;
use crate::output::{Console, write_line};

/// Does what the command line asks for, with `out` as standard output. Flushes `out` before it
/// returns.
pub(crate) fn run_to(verb: &Verb, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    let result = run(verb, out, console);
    for done in console.take_done() {
        write_line(out, &done)?;
    }
    // Flush before any error is printed, so that both streams are in order on a terminal.
    let flushed = out.flush();
    result?;
    Ok(flushed?)
}

fn run(verb: &Verb, out: &mut dyn Write, console: &Arc<Console>) -> Result {
    match verb {
        Verb::Info(arguments) => info::run(arguments, out, console),
        Verb::Ls(arguments) => ls::run(arguments, out, console),
        Verb::Stat(arguments) => stat::run(arguments, out, console),
        Verb::Find(arguments) => find::run(arguments, out, console),
        Verb::Tree(arguments) => tree::run(arguments, out, console),
        Verb::Du(arguments) => du::run(arguments, out, console),
        Verb::Df(arguments) => df::run(arguments, out, console),
        Verb::Cat(arguments) => cat::run(arguments, out, console),
        Verb::Extract(arguments) => extract::run(arguments, out, console),
        Verb::Recover(arguments) => btrfs::recover::run(arguments, out, console),
        Verb::Cp(arguments) => cp::run(arguments, out, console),
        Verb::Mkdir(arguments) => mkdir::run(arguments, out, console),
        Verb::Rm(arguments) => rm::run(arguments, out, console),
        Verb::Mv(arguments) => mv::run(arguments, out, console),
        Verb::Ln(arguments) => ln::run(arguments, out, console),
        Verb::Rmdir(arguments) => rmdir::run(arguments, console),
        Verb::Mknod(arguments) => mknod::run(arguments, console),
        Verb::Touch(arguments) => touch::run(arguments, console),
        Verb::Chmod(arguments) => chmod::run(arguments, out, console),
        Verb::Chown(arguments) => chown::run(arguments, console),
        Verb::Lsattr(arguments) => lsattr::run(arguments, out, console),
        Verb::Chattr(arguments) => chattr::run(arguments, console),
        Verb::Fallocate(arguments) => fallocate::run(arguments, console),
        Verb::Truncate(arguments) => truncate::run(arguments, console),
        Verb::Dedupe(arguments) => dedupe::run(arguments, out, console),
        Verb::Setfattr(arguments) => fattr::set(arguments, console),
        Verb::Getfattr(arguments) => fattr::get(arguments, out, console),
        Verb::Property(verb) => property::run(verb, out, console),
        Verb::Mkfs(arguments) => mkfs::run(arguments, out),
        Verb::Build(arguments) => build::run(arguments, out, console),
        Verb::Mount(arguments) => mount::mount(arguments, out, console),
        Verb::Unmount(arguments) => mount::unmount(arguments, out, console),
        Verb::InForce(arguments) => btrfs::in_force::run(arguments, out),
        Verb::Sync(arguments) => sync::run(arguments, out),
        Verb::Stats(arguments) => stats::run(arguments, out, console),
        Verb::Trim(arguments) => trim::run(arguments, out, console),
        Verb::Resize(arguments) => resize::run(arguments, out, console),
        Verb::Check(arguments) => check::run(arguments, out, console),
        Verb::Repair(arguments) => repair::run(arguments, out, console),
        Verb::Scrub(arguments) => btrfs::scrub::run(arguments, out, console),
        Verb::Subvolume(verb) => btrfs::subvolume::run(verb, out, console),
        Verb::Dump(verb) => dump::run(verb, out, console),
        Verb::Rescue(verb) => rescue::run(verb, out, console),
        Verb::Bench(verb) => bench::run(verb, out, console),
        Verb::Completions(arguments) => completions::run(arguments, out),
        Verb::Man(arguments) => man::run(arguments),
    }
}
