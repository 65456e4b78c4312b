//! Space that files share, as the kernel sees it: the calls that share space, and what the kernel
//! shows of the extents of a mounted volume.
//!
//! The two volumes of a comparison hold the same at different addresses. So a comparison looks only
//! at where in the file an extent is and at its kind: inline, encoded, preallocated, shared.
//! Neighbours of the same kind are joined, because the kernel itself shows two extents as one if
//! they happen to be next to each other on the disk.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use crate::run::{command, run};

/// A place in a file: its path, and a byte offset.
pub type FileOffset<'p> = (&'p Path, u64);

/// `FICLONERANGE`: makes `to` share `len` bytes of `from`.
///
/// # Errors
/// The error number of the kernel.
pub fn clone_range(from: FileOffset<'_>, to: FileOffset<'_>, len: u64) -> Result<(), i32> {
    const CALL: &str = r#"
        my $range = pack("qQQQ", fileno($source), $offset, $len, $to_offset);
        exit(ioctl($target, 0x4020940D, $range) ? 0 : $! + 0);"#;
    match call(CALL, from, to, len) {
        0 => Ok(()),
        errno => Err(errno),
    }
}

/// `FIDEDUPERANGE`: makes two files share `len` bytes if these are equal. Returns whether they
/// were. If they were, the kernel must report all `len` bytes as shared, even if the last sector is
/// partial.
///
/// # Errors
/// The error number of the kernel.
pub fn dedupe_range(from: FileOffset<'_>, to: FileOffset<'_>, len: u64) -> Result<bool, i32> {
    const DIFFERS: i32 = 200;
    const CALL: &str = r#"
        my $range = pack("QQSSL", $offset, $len, 1, 0, 0)
            . pack("qQQlL", fileno($target), $to_offset, 0, 0, 0);
        ioctl($source, 0xC0189436, $range) or exit($!);
        my (undef, undef, undef, undef, undef, undef, undef, $done, $status) = unpack("QQSSLqQQl", $range);
        $done == ($status == 0 ? $len : 0) or die "dedupe of $done bytes: $status";
        exit($status == 1 ? 200 : -$status);"#;
    match call(CALL, from, to, len) {
        0 => Ok(true),
        DIFFERS => Ok(false),
        errno => Err(errno),
    }
}

/// Makes calls on two open files for which there is no safe function.
fn call(script: &str, from: FileOffset<'_>, to: FileOffset<'_>, len: u64) -> i32 {
    const OPEN: &str = r#"
        my ($from, $offset, $to, $to_offset, $len) = @ARGV;
        use Fcntl;
        open(my $source, "<", $from) or die;
        # What may not be written can be shared with.
        my $target;
        sysopen($target, $to, O_RDWR) or sysopen($target, $to, O_RDONLY) or die;"#;
    let args: [OsString; 5] = [
        from.0.into(),
        from.1.to_string().into(),
        to.0.into(),
        to.1.to_string().into(),
        len.to_string().into(),
    ];
    let status = command("perl").arg("-e").arg([OPEN, script].concat()).args(args).status();
    let code = status.expect("perl runs").code().expect("it ends by itself");
    assert!(code < 255, "the script fails");
    code
}

/// An extent that `filefrag` prints: the range in the file, in bytes, and its kinds.
pub type ShownExtent = (Range<u64>, Vec<String>);

/// What `filefrag` prints of all regular files below a mounted directory, by relative path.
#[must_use]
pub fn extents(mount: &Path) -> BTreeMap<String, Vec<ShownExtent>> {
    rustix::fs::syncfs(File::open(mount).expect("the directory opens")).expect("a sync");
    let mut all: BTreeMap<String, Vec<ShownExtent>> = BTreeMap::new();
    let mut extents = None;
    let script = r#"cd "$1"; find . -type f -exec filefrag -v -b1 {} +"#;
    for line in
        run("sh", &["-ec".as_ref(), script.as_ref(), "sh".as_ref(), mount.as_os_str()]).lines()
    {
        if let Some(rest) = line.strip_prefix("File size of ") {
            let (path, _) = rest.rsplit_once(" is ").expect("a path");
            extents = Some(all.entry(path.to_owned()).or_default());
        } else if let (Some(extents), Some(extent)) = (&mut extents, extent(line)) {
            match extents.last_mut() {
                Some((last, flags)) if last.end == extent.0.start && *flags == extent.1 => {
                    last.end = extent.0.end;
                }
                _ => extents.push(extent),
            }
        }
    }
    all
}

/// `0:  0..  4095:  13631488..  13635583:  4096:  13631489: last,shared,eof`
fn extent(line: &str) -> Option<ShownExtent> {
    let (number, rest) = line.split_once(':')?;
    number.trim().parse::<u64>().ok()?;
    let (logical, rest) = rest.split_once(':')?;
    let (start, last) = logical.split_once("..")?;
    let [start, last] = [start, last].map(|at| at.trim().parse::<u64>().expect("an offset"));
    let (_, flags) = rest.rsplit_once(':')?;
    let counts = |flag: &&str| !matches!(*flag, "last" | "eof" | "merged" | "");
    let flags = flags.trim().split(',').filter(counts).map(str::to_owned).collect();
    Some((start..last + 1, flags))
}
