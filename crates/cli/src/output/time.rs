//! Points in time as text, in the time zone of the caller: `TZ`, or `/etc/localtime`.

use std::fmt;
use std::sync::OnceLock;

use jiff::tz::TimeZone;
use offshoot_vfs::Timestamp;

/// A point in time in the calendar, in the form of `stat`: `2026-11-20 10:30:00.123456789 +0100`.
/// The alternate form (`{:#}`) is the short one of `ls -l`: `2026-11-20 10:30`.
#[derive(Clone, Copy)]
pub(crate) struct CivilTime(pub(crate) Timestamp);

/// The time zone of the caller.
pub(crate) fn zone() -> &'static TimeZone {
    static ZONE: OnceLock<TimeZone> = OnceLock::new();
    ZONE.get_or_init(TimeZone::system)
}

/// How many seconds the clock of `zone` is ahead of UTC at that time. A damaged volume may hold
/// times that no calendar has; these are shown in UTC.
fn seconds_ahead(zone: &TimeZone, time: Timestamp) -> i64 {
    let known = jiff::Timestamp::from_second(time.secs);
    known.map_or(0, |known| zone.to_offset(known).seconds().into())
}

impl fmt::Display for CivilTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_time(f, self.0, seconds_ahead(zone(), self.0))
    }
}

fn write_time(f: &mut fmt::Formatter<'_>, time: Timestamp, ahead: i64) -> fmt::Result {
    let Timestamp { secs, nanos } = time;
    let local = secs.saturating_add(ahead);
    let (year, month, day) = civil_date(local.div_euclid(86_400));
    let second = local.rem_euclid(86_400);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    write!(f, "{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}")?;
    if f.alternate() {
        return Ok(());
    }
    let (sign, minutes) = (if ahead < 0 { '-' } else { '+' }, ahead.abs() / 60);
    write!(f, ":{second:02}.{nanos:09} {sign}{:02}{:02}", minutes / 60, minutes % 60)
}

/// The Gregorian date of a day counted from 1970-01-01.
///
/// The calendar repeats every 400 years (146,097 days). Counting years from March puts the leap day
/// at the end of its year, so the months before it have fixed lengths.
fn civil_date(days: i64) -> (i64, i64, i64) {
    // 719,468 days lie between 0000-03-01 and 1970-01-01. 64-bit seconds leave room.
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Ahead(Timestamp, i64);

    impl fmt::Display for Ahead {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write_time(f, self.0, self.1)
        }
    }

    fn text(secs: i64, nanos: u32) -> String {
        Ahead(Timestamp { secs, nanos }, 0).to_string()
    }

    #[test]
    fn zones() {
        let zone = TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap();
        let in_zone = |secs| {
            let time = Timestamp { secs, nanos: 0 };
            Ahead(time, seconds_ahead(&zone, time)).to_string()
        };
        assert_eq!(in_zone(1_795_167_000), "2026-11-20 10:30:00.000000000 +0100");
        assert_eq!(in_zone(1_782_120_600), "2026-06-22 11:30:00.000000000 +0200");
        let west = Ahead(Timestamp { secs: 0, nanos: 0 }, -12_600).to_string();
        assert_eq!(west, "1969-12-31 20:30:00.000000000 -0330");
        let _ = (in_zone(i64::MIN), in_zone(i64::MAX));
    }

    #[test]
    fn calendar() {
        assert_eq!(text(0, 0), "1970-01-01 00:00:00.000000000 +0000");
        assert_eq!(text(-1, 999_999_999), "1969-12-31 23:59:59.999999999 +0000");
        assert_eq!(text(951_782_400, 1), "2000-02-29 00:00:00.000000001 +0000");
        assert_eq!(text(4_107_542_400, 0), "2100-03-01 00:00:00.000000000 +0000");
        assert_eq!(text(1_795_167_000, 0), "2026-11-20 09:30:00.000000000 +0000");
        // The extremes of the field must not overflow.
        let _ = (text(i64::MIN, 0), text(i64::MAX, 0));
    }
}
